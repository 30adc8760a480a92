"""How ``make gpu-matrix`` calls pytest."""

from __future__ import annotations

import pytest

from equivtest import gpumatrix
from equivtest.cli import main


def test_the_workers_are_as_many_as_the_gpus_allow() -> None:
    assert gpumatrix.workers(8, 4, True) == ["-n", "2"]
    assert gpumatrix.workers(0, 4, True) == ["-n", "1"]
    assert gpumatrix.workers(8, 4, False) == []  # without xdist there is one process


def test_the_plugin_is_named_only_where_pytest_does_not_find_it() -> None:
    assert gpumatrix.plugins(installed=False) == ["-p", "equivtest.plugin"]
    assert gpumatrix.plugins(installed=True) == []


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        (
            {"torch"},
            "this Python lacks torch: install the build of torch for this machine's driver, which "
            "is not chosen here",
        ),
        (
            {"pandas", "sklearn"},
            "this Python lacks pandas, scikit-learn; the rest comes with: "
            "pip install pandas scikit-learn",
        ),
    ],
)
def test_what_an_interpreter_lacks_is_named(lacking: set[str], message: str) -> None:
    with pytest.raises(gpumatrix.MissingPackagesError) as error:
        gpumatrix.check_packages(lambda module: None if module in lacking else module)
    assert str(error.value) == message
    gpumatrix.check_packages(lambda module: module)


def test_the_command_prints_the_arguments_or_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpumatrix, "gpus_at_hand", lambda: 8)
    assert main(["devices", "--max-D", "4"]) == 0
    assert capsys.readouterr().out.strip().endswith("-n 2")

    monkeypatch.setattr(gpumatrix, "NEEDED", {"no_such_module": "no-such-package"})
    assert main(["devices"]) == 2
    assert "this Python lacks no-such-package" in capsys.readouterr().err
