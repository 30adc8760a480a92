"""The pages in a browser: what a person does with them, with scripts and without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import verdicts
from made_pages import Opener, everything

from equivtest.plan import Plan
from equivtest.report.comparing import compare
from equivtest.report.comparisonpage import write_comparison
from equivtest.report.page import write_page
from equivtest.report.run import Run
from equivtest.report.views import anchor

PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
PLAN = Plan(4, 2, 2)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "divergence.html"
    write_page(everything(), path)
    return path


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    old = Run((verdicts.record(verdicts.equivalent(PLAN)),), run_ids=("old",))
    new = Run((verdicts.record(verdicts.fault(PLAN)),), run_ids=("new",))
    path = tmp_path_factory.mktemp("comparison") / "comparison.html"
    write_comparison(compare(old, new), path)
    return path


def passing_case() -> str:
    """Place of a case that stands in a closed group."""
    return anchor(everything().records[-1])


def test_words_and_status_filter_the_index_and_dim_the_matrix(report: Path, opened: Opener) -> None:
    shown = opened(report)
    page = shown.page
    assert page.locator("output").text_content() == "8 of 8 rows, 24 of 24 cases"
    page.locator("input[type=search]").fill("FP64 recipe_lm")
    assert shown.rows() == ["= equivalent recipe_lm my_loop fp64"]
    assert page.locator("output").text_content() == "1 of 8 rows, 9 of 24 cases"
    bright = page.locator(".matrix td a:not(.dim)")
    assert bright.count() == 9
    page.get_by_role("button", name="Show all").click()
    assert len(shown.rows()) == 8
    page.locator("input[value=equivalent]").uncheck()
    assert not any("equivalent" in row for row in shown.rows())
    assert len(shown.rows()) == 5


def test_a_word_of_a_cause_finds_its_row(report: Path, opened: Opener) -> None:
    shown = opened(report)
    shown.page.locator("input[type=search]").fill("clip.missing no_clip")
    assert shown.rows() == ["≠ fault planted_loop no_clip bf16-mixed"]


def test_a_count_of_the_strip_shows_its_status_alone(report: Path, opened: Opener) -> None:
    shown = opened(report)
    shown.page.locator(".strip li.error a").click()
    assert [row[:7] for row in shown.rows()] == ["! error"]
    assert shown.page.locator("#index h2").bounding_box()["y"] < 200
    assert "status=error" in shown.page.url


def test_a_head_sorts_one_way_and_then_the_other(report: Path, opened: Opener) -> None:
    shown = opened(report)
    head = shown.page.locator("th[data-sort=margin]")
    margins = "rows => rows.map(row => Number(row.cells[7].dataset.value))"
    rows = shown.page.locator("table.index tbody tr")
    head.locator("button").click()
    falling = rows.evaluate_all(margins)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 5e12
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert rows.evaluate_all(margins) == sorted(falling)
    assert head.get_attribute("aria-sort") == "ascending"
    shown.page.locator("th[data-sort=precision] button").click()
    assert head.get_attribute("aria-sort") is None
    precisions = rows.evaluate_all("rows => rows.map(row => row.cells[3].textContent)")
    assert precisions == sorted(precisions)


def test_the_address_opens_the_same_view(report: Path, opened: Opener) -> None:
    first = opened(report)
    first.page.locator("input[type=search]").fill("recipe_lm")
    first.page.locator("input[value=fault]").uncheck()
    first.page.locator("th[data-sort=precision] button").click()
    fragment = first.page.url.partition("#")[2]
    again = opened(report, f"#{fragment}")
    assert again.rows() == first.rows()
    assert len(again.rows()) == 2
    assert again.page.locator("input[type=search]").input_value() == "recipe_lm"
    assert not again.page.locator("input[value=fault]").is_checked()
    assert again.page.locator("th[data-sort=precision]").get_attribute("aria-sort") == "ascending"


def test_a_link_to_a_case_keeps_the_view_and_back_returns(report: Path, opened: Opener) -> None:
    shown = opened(report)
    shown.page.locator("input[type=search]").fill("ragged fp64")
    shown.page.locator("table.index tbody tr:visible a").first.click()
    place = shown.page.url.partition("#")[2]
    assert re.fullmatch(r"case-\w{10}\?q=ragged\+fp64", place)
    again = opened(report, f"#{place}")
    assert again.page.locator(f"#{place[:15]}").is_visible()
    assert again.rows() == shown.rows()


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_a_deep_link_opens_a_case_in_a_closed_group(
    report: Path, opened: Opener, scripts: bool
) -> None:
    place = passing_case()
    closed = opened(report, java_script_enabled=scripts).page
    assert not closed.locator(f"#{place}").is_visible()
    linked = opened(report, f"#{place}", java_script_enabled=scripts).page
    linked.locator(f"#{place}").wait_for(state="visible")
    box = linked.locator(f"#{place}").bounding_box()
    assert 0 <= box["y"] < 400


def test_the_keyboard_alone_reaches_and_opens_a_failing_case(report: Path, opened: Opener) -> None:
    page = opened(report).page
    focused = "document.activeElement.textContent"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the verdict"
    page.keyboard.press("Enter")
    page.keyboard.press("/")
    page.keyboard.type("ragged fp64")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('table.index tbody') !== null"):
            break
    page.keyboard.press("Enter")
    place = page.url.partition("#")[2].partition("?")[0]
    assert page.locator(f"#{place}").is_visible()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.localName") == "summary"
    assert page.evaluate(outline) == "solid"
    first = page.evaluate(focused)
    page.keyboard.press("n")
    assert page.evaluate(focused) != first
    page.keyboard.press("p")
    assert page.evaluate(focused) == first


def test_escape_ends_a_filter_and_keys_in_the_field_are_letters(
    report: Path, opened: Opener
) -> None:
    shown = opened(report)
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("np/")
    assert shown.page.locator("input[type=search]").input_value() == "np/"
    assert shown.rows() == []
    shown.page.keyboard.press("Escape")
    shown.page.wait_for_function("document.querySelector('input[type=search]').value === ''")
    assert len(shown.rows()) == 8


def test_the_page_follows_the_dark_mode(report: Path, opened: Opener) -> None:
    def brightness(page: Any, what: str) -> float:
        colour = page.evaluate(f"getComputedStyle(document.body).{what}")
        red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
        return (red + green + blue) / 3

    light = opened(report, color_scheme="light").page
    dark = opened(report, color_scheme="dark").page
    assert brightness(light, "backgroundColor") > 200 > 100 > brightness(light, "color")
    assert brightness(dark, "backgroundColor") < 60 < 180 < brightness(dark, "color")


def test_print_shows_every_case_and_no_controls(report: Path, opened: Opener) -> None:
    page = opened(report).page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator(f"#{passing_case()}").is_visible()
    assert not page.locator("#filter").is_visible()
    assert not page.locator(".top nav").is_visible()
    assert page.locator(".copy button:visible").count() == 0
    assert page.locator(".case .mark:visible").count() > 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator(f"#{passing_case()}").is_visible()


def test_without_scripts_everything_but_the_controls_is_there(report: Path, opened: Opener) -> None:
    with_scripts = opened(report).page
    without = opened(report, java_script_enabled=False).page
    assert not without.locator("#filter").is_visible()
    for what in ("table.index tbody tr", ".matrix td a", ".mosaic svg", ".depth svg", "details"):
        assert without.locator(what).count() == with_scripts.locator(what).count() > 0, what
    without.locator(".case > summary").last.scroll_into_view_if_needed()
    without.locator(".group > summary").first.click()
    assert without.locator(".group[open]").count() == 1


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_the_pages_ask_for_nothing_and_complain_of_nothing(
    report: Path, comparison: Path, opened: Opener, phone: bool
) -> None:
    for path in (report, comparison):
        shown = opened(path, **(PHONE if phone else {}))
        for summary in shown.page.locator("summary:visible").all()[:20]:
            summary.click()
        assert shown.asked == []
        assert shown.complaints == []


def test_a_phone_scrolls_no_page_sideways(report: Path, comparison: Path, opened: Opener) -> None:
    for path in (report, comparison):
        page = opened(path, **PHONE).page
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_copy_button_takes_the_command(report: Path, opened: Opener) -> None:
    page = opened(report, permissions=["clipboard-read", "clipboard-write"]).page
    button = page.locator(".worst .copy button")
    button.click()
    button.filter(has_text="Copied").wait_for()
    assert page.evaluate("getSelection().toString()").startswith("pytest 'cases/test_loop.py")


def test_hostile_text_in_every_field_stays_text(tmp_path: Path, opened: Opener) -> None:
    hostile, text = verdicts.everywhere_hostile(), verdicts.HOSTILE
    run = Run((hostile,), {text: text}, False, (text,), unreadable=(text,), selection=text)
    write_page(run, tmp_path / "report.html")
    write_comparison(compare(run, everything()), tmp_path / "comparison.html")
    for name in ("report.html", "comparison.html"):
        shown = opened(tmp_path / name)
        assert shown.page.evaluate("window.owned") is None
        assert shown.complaints == []
        assert shown.asked == []
        assert shown.page.locator("img").count() == 0
        assert shown.page.locator("script").count() == 1
        assert "<script>window.owned = 1</script>" in shown.page.locator("main").text_content()


def test_files_beside_the_page_serve_it_under_a_policy_without_inline(
    tmp_path: Path, chromium: Any
) -> None:
    write_page(everything(), tmp_path / "divergence.html", external=True)
    context = chromium.new_context()
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))

    def serve(route: Any) -> None:
        name = route.request.url.rpartition("/")[2]
        policy = "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:"
        route.fulfill(
            path=tmp_path / name, headers={"Content-Security-Policy": policy, **_type(name)}
        )

    page.route("http://reports.test/*", serve)
    page.goto("http://reports.test/divergence.html")
    assert page.locator("#filter").is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.strip')).display") == "flex"
    assert complaints == []
    context.close()


def _type(name: str) -> dict[str, str]:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    return {"Content-Type": f"{kinds[name.rpartition('.')[2]]}; charset=utf-8"}


@pytest.mark.parametrize(("scheme", "phone"), [("light", False), ("dark", True)])
def test_axe_finds_nothing_serious(
    report: Path, comparison: Path, opened: Opener, scheme: str, phone: bool
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for path in (report, comparison):
        page = opened(path, color_scheme=scheme, **(PHONE if phone else {})).page
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        found = Axe().run(page).response["violations"]
        assert [_told(one) for one in found if one["impact"] in ("serious", "critical")] == []


def _told(violation: dict[str, Any]) -> str:
    node = violation["nodes"][0]
    return f"{violation['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
