"""The page's text: what stands in it, what never may, and how the file comes to be."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leap_rs
from leap_rs.replay.page.rows import INSTANTS, LEVELS, METRICS, PointDetail, PolicyDetail, Prediction

pytest.importorskip("altair")

from leap_rs.replay import page as replay_page
from leap_rs.replay.page.charts import spacing
from leap_rs.replay.page.figures import axes, figures
from leap_rs.replay.page.html import page
from leap_rs.replay.page.style import drawing_order, hidden_behind, looks

Make = Callable[..., dict[str, Any]]
EVIL = "</script><script>alert('x')</script>&\"<img src=x>"


def detail(policies: list[str], point: int = 0, nothing: bool = False) -> PointDetail:
    """Plausible details without a replay."""
    quantiles = {metric: np.empty(0) if nothing else 1.0 + 100 * LEVELS for metric in METRICS}
    bins = Prediction(np.array([1.0, 8.0, 64.0]), np.array([[3, 1], [0, 4]]), ranks=False)
    waiting = np.arange(INSTANTS)
    return PointDetail(
        point,
        np.linspace(0, 40, INSTANTS),
        {policy: PolicyDetail(quantiles, waiting, None if policy == "fcfs" else bins) for policy in policies},
    )


def data_of(text: str) -> Any:
    """The page's data, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found, parse_constant=refuse)


def rows_of(table: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def test_nothing_that_a_user_gave_is_markup(make_document: Make, core_result: Make) -> None:
    policies = ["fcfs", f"score:{EVIL}"]
    document = make_document([core_result(policy) for policy in policies], metadata={EVIL: EVIL})
    document["trace"]["path"] = f"traces/{EVIL}.csv"
    document["notes"].append(EVIL)
    document["conclusions"] = [f"{EVIL}: {EVIL}"]
    text = page(document, [detail(policies)], f"leap-replay '{EVIL}'", "/* bundle */")
    assert "<script>alert" not in text
    assert "<img" not in text
    assert text.count("<script") == 3  # the data, the bundle and the page's own
    assert data_of(text)["policies"] == policies
    (command,) = re.findall(r'<code id="command">(.*?)</code>', text, re.DOTALL)
    assert unescape(command) == f"leap-replay '{EVIL}'"


def test_a_bundle_cannot_end_its_script(make_document: Make, core_result: Make) -> None:
    text = page(make_document([core_result("fcfs")]), [detail(["fcfs"])], "", "'</script>' + '<!-- x'")
    assert r"'<\/script>' + '<\!-- x'" in text


def test_undefined_numbers_are_left_out(make_document: Make, core_result: Make) -> None:
    document = make_document([core_result("fcfs", ptl=None, tpot=None), core_result("leap", ptl=None)])
    text = page(document, [detail(["fcfs", "leap"], nothing=True)], "", "")
    names = [figure["name"] for figure in data_of(text)["figures"]]
    assert "mean-ptl-ms" not in names
    assert "cdf-ptl" not in names
    assert "p99-e2el-ms" in names
    assert re.search(r'data-policy="0"[^>]*>.*?<td class="first">-</td>', text)


def test_the_page_names_no_other_place(make_document: Make, core_result: Make) -> None:
    document = make_document([core_result("fcfs"), core_result("leap")])
    text = page(document, [detail(["fcfs", "leap"])], "", "")
    assert set(re.findall(r"""(?:src|href)=["']([^"']*)""", text)) == {"data:,"}
    assert "//" not in json.dumps(data_of(text))
    assert "http" not in text.replace("http-equiv", "")


def test_latency_follows_the_sweep_with_its_intervals(make_document: Make, core_result: Make) -> None:
    loads = [0.8, 1.2, 1.6]
    policies = ["fcfs", "leap"]
    results = [
        core_result(policy, point=i, load=load, ptl=100.0 * load + len(policy))
        for i, load in enumerate(loads)
        for policy in policies
    ]
    document = make_document(results, sweep=["load=0.8,1.2,1.6"])
    drawn = {figure.name: figure for figure in figures(document, [detail(policies, i) for i in range(3)])}
    (table,) = drawn["mean-ptl-ms"].tables  # one for all points
    found = {(policies[row["policy"]], row["x"]): row for row in rows_of(table)}
    assert len(found) == 6
    for policy in policies:
        for load in loads:
            mean = 100.0 * load + len(policy)
            row = found[policy, load]
            assert (row["mean"], row["low"], row["high"]) == pytest.approx((mean, mean - 1, mean + 1), rel=1e-4)
    assert "'Mean PTL, ms'" in str(drawn["mean-ptl-ms"].spec)
    assert "'P99 E2EL, s'" in str(drawn["p99-e2el-ms"].spec)


def test_a_product_is_cut_through_the_shown_point(make_document: Make, core_result: Make) -> None:
    rates = [0.0, 0.05, 0.1]
    points = [(load, rate) for load in (1.0, 1.4) for rate in rates]
    results = [core_result("fcfs", point=i, load=load, ptl=10 * load + rate) for i, (load, rate) in enumerate(points)]
    document = make_document(results, sweep=["load=1,1.4", "aging-rate=0,0.05,0.1"])
    # The option with more values is the axis.
    assert axes(document) == ["aging_rate", "load"]
    drawn = {figure.name: figure for figure in figures(document, [detail(["fcfs"], i) for i in range(6)])}
    tables = drawn["mean-ptl-ms"].tables
    assert len(tables) == 6
    for i, (load, _) in enumerate(points):
        found = [(row["x"], row["mean"]) for row in rows_of(tables[i])]
        assert found == [(rate, pytest.approx(10 * load + rate, rel=1e-4)) for rate in rates]


def test_quartiles_are_relative_to_fcfs(make_document: Make, core_result: Make) -> None:
    leap = core_result("leap")
    for quartile, share in zip(leap["by_quartile"], (0.5, 0.8, 1.0, 1.25), strict=True):
        quartile["mean_e2el_ms"]["mean"] *= share
    document = make_document([core_result("fcfs"), leap])
    (figure,) = (f for f in figures(document, [detail(["fcfs", "leap"])]) if f.name == "quartiles")
    rows = [row for row in rows_of(figure.tables[0]) if row["policy"] == 1]
    assert [row["value"] for row in rows] == [0.5, 0.8, 1.0, 1.25]
    assert [row["group"] for row in rows] == [
        *("up to 84, 25 %", "85 to 210, 25 %", "211 to 420, 25 %", "421 to 1,024, 25 %"),
    ]
    assert [row["seconds"] for row in rows] == [4.2, 16.8, 42.0, 128.0]


def test_two_quartiles_of_equal_lengths_are_one_group_with_half_of_the_requests(
    make_document: Make, core_result: Make
) -> None:
    """As in a trace where the cap ends half of the answers."""
    fcfs = core_result("fcfs")
    *kept, longest = fcfs["by_quartile"]
    fcfs["by_quartile"] = [*kept[:2], {**longest, "requests": 2 * longest["requests"]}]
    (figure,) = (f for f in figures(make_document([fcfs]), [detail(["fcfs"])]) if f.name == "quartiles")
    assert figure.tables[0]["group"] == ["up to 84, 25 %", "85 to 210, 25 %", "211 to 1,024, 50 %"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((0.6, 0.8, 1.6), "linear"),
        ((0.0, 0.01, 0.02), "linear"),
        ((0.001, 0.01, 0.1), "log"),
        ((0.0, 0.001, 0.01, 0.1), "symlog"),
        ((0.0,), "linear"),
    ],
)
def test_swept_values_stand_apart_on_their_axis(
    make_document: Make, core_result: Make, values: tuple[float, ...], kind: str
) -> None:
    assert spacing(values) == kind
    points = [*values, values[-1] + 1e-9]  # one point alone is no sweep
    results = [core_result("fcfs", point=i, load=1.0, ptl=10.0 + i) for i in range(len(points))]
    document = make_document(results, sweep=["aging-rate=" + ",".join(map(str, points))])
    (figure,) = (f for f in figures(document, [detail(["fcfs"], 0)]) if f.name == "mean-ptl-ms")
    scale = figure.spec["layer"][0]["encoding"]["x"]["scale"]
    assert scale.get("type", "linear") == kind
    assert scale.get("constant") == (0.001 if kind == "symlog" else None)


def test_no_latency_axis_goes_below_zero(make_document: Make, core_result: Make) -> None:
    """The interval of two seeds may."""
    for count in (1, 2):
        results = [core_result("fcfs", point=i, load=1.0 + i, ptl=5.0) for i in range(count)]
        for result in results:
            result["metrics"]["mean_ptl_ms"]["ci95"] = [-60.0, 70.0]
        document = make_document(results, sweep=["load=1,2"][: count - 1])
        (figure,) = (f for f in figures(document, [detail(["fcfs"], 0)]) if f.name == "mean-ptl-ms")
        scales = [layer["encoding"]["y" if count == 2 else "x"].get("scale", {}) for layer in figure.spec["layer"]]
        assert {"domainMin": 0} in scales
        assert figure.tables[0]["low"][0] == -60


@pytest.mark.parametrize(
    ("longest", "numbered"), [(1e6, [1]), (100.0, [1, 3]), (20.0, [1, 2, 5])], ids=["6 decades", "2", "1.3"]
)
def test_ticks_of_a_distribution_are_numbered_evenly(
    make_document: Make, core_result: Make, longest: float, numbered: list[int]
) -> None:
    reduced = detail(["fcfs"])
    quantiles = {metric: np.geomspace(1.0, longest, len(LEVELS)) for metric in METRICS}
    reduced = PointDetail(
        0, reduced.instants, {"fcfs": PolicyDetail(quantiles, reduced.policies["fcfs"].waiting, None)}
    )
    (figure,) = (f for f in figures(make_document([core_result("fcfs")]), [reduced]) if f.name == "cdf-ptl")
    assert f"indexof({numbered}," in figure.spec["layer"][0]["encoding"]["x"]["axis"]["labelExpr"]


def test_the_legend_says_whose_line_lies_over_anothers(make_document: Make, core_result: Make) -> None:
    results = [core_result(name, ptl=ptl) for name, ptl in (("fcfs", 9.0), ("las", 9.0), ("mlfq", 9.0), ("leap", 8.0))]
    document = make_document(results)
    assert hidden_behind(document) == {"las": "fcfs", "mlfq": "fcfs"}
    text = page(document, [detail(["fcfs", "las", "mlfq", "leap"])], "", "")
    assert text.count("<small>= fcfs</small>") == 2
    document["results"][1]["metrics"]["p99_e2el_ms"] = {"mean": 1.0, "ci95": None}
    assert hidden_behind(document) == {"mlfq": "fcfs"}


def test_a_rank_correlation_of_nothing_has_no_sign(make_document: Make, core_result: Make) -> None:
    result = core_result("score:a")
    result["prediction"] = {"spearman": -0.004}
    document = make_document([result])
    (figure,) = (f for f in figures(document, [detail(["score:a"])]) if f.section == "predictions")
    assert figure.captions == ["score:a: Spearman 0.00"]


def test_policies_keep_their_looks() -> None:
    whole = {look.policy: look for look in looks(["fcfs", "leap", "leap:batch=1", "score:a", "score:b", "srpt-oracle"])}
    assert len({look.colour for look in whole.values()}) == 6
    assert looks(["leap"])[0] == whole["leap"]
    assert whole["srpt-oracle"].dash != ()
    assert all(look.dash == () for name, look in whole.items() if "oracle" not in name)
    assert drawing_order(["leap", "fcfs", "las"]) == [2, 1, 0]


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    path = tmp_path / "quiet.csv"
    rows = [f"{0.4 * i},{100 + 7 * i},{(8, 600, 30, 250)[i % 4]}" for i in range(24)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return path


def test_the_python_face_writes_the_same_bytes_again(quiet: Path, tmp_path: Path) -> None:
    result = leap_rs.replay(str(quiet), policies=("fcfs", "sjf-oracle"), seeds=2, max_num_seqs=4, request_rate=np.inf)
    first = result.report(tmp_path / "a.html")
    assert first.read_bytes() == result.report(tmp_path / "b.html").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"quiet.csv", "a.html", "b.html"}
    text = first.read_text()
    (command,) = re.findall(r'<code id="command">(.*?)</code>', text)
    again = eval(unescape(command), {"leap_rs": leap_rs})
    assert again.to_dict() == result.to_dict()
    assert "seed=0" in unescape(command)


def test_a_page_needs_rows_and_a_place(quiet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = leap_rs.replay(quiet, policies="fcfs", seeds=1, keep_requests=False)
    with pytest.raises(leap_rs.LeapError, match="keep_requests=True"):
        result.report(tmp_path / "page.html")
    with pytest.raises(leap_rs.ConfigError, match=r"cannot be written: there is no directory .*nowhere$"):
        result.report(tmp_path / "nowhere" / "page.html")
    monkeypatch.setitem(sys.modules, "altair", None)  # as where it is not installed
    with pytest.raises(leap_rs.ConfigError, match=re.escape('pip install "leap-rs[report]"')):
        replay_page.check(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["quiet.csv"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, make_document: Make, core_result: Make) -> None:
    target = tmp_path / "page.html"
    target.mkdir()  # a file cannot replace it
    with pytest.raises(leap_rs.LeapError, match=r"page\.html: cannot be written"):
        replay_page.write(target, make_document([core_result("fcfs")]), [detail(["fcfs"])], "")
    assert list(tmp_path.iterdir()) == [target]
