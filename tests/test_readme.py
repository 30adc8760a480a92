"""Every code block of the README runs as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_readme_has_two_cases_a_script_and_two_commands() -> None:
    assert [kind for kind, _ in BLOCKS] == ["sh", "python", "python", "python"]


LEFT_OUT = {
    "clip.missing": ("        clip_grad_norm_(rank.module.parameters(), 1.0)\n", ""),
    "prec.not_applied": (
        "                with rank.autocast():\n",
        "                if True:\n",
    ),
}
"""By cause, a line of the case, and what stands in its place."""


def test_the_cases_pass_and_name_their_cause_without_the_clip_or_the_autocast(
    tmp_path: Path,
) -> None:
    case = blocks("python")[0]
    (tmp_path / "test_my_loop.py").write_text(case)
    (tmp_path / "test_normalised.py").write_text(blocks("python")[2])
    for cause, (line, instead) in LEFT_OUT.items():
        assert line in case
        # Bound 0.01: active in every update of this model.
        faulty = case.replace(line, instead).replace("clip_norm=1.0", "clip_norm=0.01")
        faulty = faulty.replace("parameters(), 1.0)", "parameters(), 0.01)")
        (tmp_path / f"test_{cause.replace('.', '_')}.py").write_text(faulty)
    plugin = [] if installed() else ["-p", "equivtest.plugin"]
    only = "test_my_loop.py or test_normalised.py or (bf16-mixed and m8-A2-D2)"
    done = run(sys.executable, "-m", "pytest", "-q", "-k", only, *plugin, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    # plans(32, max_D=2): six factorisations of 32 at D=1, five of 16 at D=2; three precisions; and
    # two plans of the case with BatchNorm.
    assert "2 failed, 35 passed" in done.stdout
    records = [json.loads(p.read_text()) for p in tmp_path.glob("reports/runs/*/cases/*.json")]
    found = {r["id"].partition("::")[0]: r["outcome"]["causes"] for r in records}
    for cause in LEFT_OUT:
        assert cause in found[f"test_{cause.replace('.', '_')}.py"]
    assert found["test_my_loop.py"] == []
    assert found["test_normalised.py"] == ["source.batchnorm"]
    assert (tmp_path / "reports" / "divergence.html").exists()


def test_the_script_passes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(blocks("python")[1])
    done = run(sys.executable, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equivalent" in done.stdout


def test_the_commands_are_targets_of_the_makefile() -> None:
    for line in blocks("sh")[0].splitlines():
        command = line.split("#")[0].split()
        done = run(*command, "--dry-run", cwd=ROOT)
        assert done.returncode == 0, done.stderr


def installed() -> bool:
    """Whether the package is installed, and with it the plugin's entry point."""
    from importlib.metadata import entry_points

    return any(e.name == "equivtest" for e in entry_points(group="pytest11"))
