"""Charts of measured times, drawn by Altair: interactive in a report, static as SVG.

Altair and vl-convert come with ``attnplug-tune[plot]``. They are imported when a chart is drawn: ``tune`` and ``bench``
measure on GPU hosts without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnplug.declare.problem import Role
from attnplug_tune.points import Point
from attnplug_tune.results import BenchRow, by_point, sides_of

LIMIT = "limit: each byte moved once"
COLORS = ("#2456c7", "#c2410c", "#17693a", "#7c3aed", "#b3261e", "#0e7490", "#8a5a00", "#be185d")
FONT = "Liberation Sans, Arial, sans-serif"
"""vl-convert carries Liberation Sans, so that an SVG has the same layout on every machine."""
_GREY = "#6b7483"
_WIDTH, _HEIGHT, _COLUMNS = 380, 210, 2
_SHORT = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : datum.value"
"""Vega expression for axis labels: 4096 as 4k."""
Points = Mapping[Point, Mapping[str, BenchRow]]


def chart_spec(points: Points, sides: Sequence[str]) -> dict[str, Any]:
    """Vega-Lite spec of one layer's times in one role. Clicking a side in the legend highlights it.

    ``sides`` fixes the colours, so that a side has the same one in all charts of a report.
    """
    import altair as alt

    highlighted = alt.selection_point(fields=["side"], bind="legend")
    return spec_of(_panels(points, sides, highlighted).add_params(highlighted))


def rows_as_svg(rows: Sequence[BenchRow]) -> str:
    """Draw all rows as one SVG document."""
    import altair as alt

    groups = by_point(rows)
    if not groups:
        return as_svg(spec_of(alt.Chart(alt.Data(values=[{}])).mark_text(text="Nothing was measured.")))
    sides = all_sides(rows)
    drawn = [_panels(points, sides).properties(title=f"{role}: {layer}") for (layer, role), points in groups.items()]
    return as_svg(spec_of(alt.vconcat(*drawn)))


def all_sides(rows: Sequence[BenchRow]) -> list[str]:
    return sorted({side for points in by_point(rows).values() for side in sides_of(points)})


def spec_of(drawn: Any) -> dict[str, Any]:
    """Vega-Lite spec of an Altair chart, in the style of all our charts."""
    styled = drawn.configure(font=FONT).configure_title(anchor="start").configure_legend(labelLimit=400)
    spec: dict[str, Any] = styled.to_dict()
    return spec


def as_svg(spec: Mapping[str, Any]) -> str:
    """Render a Vega-Lite spec as an SVG document."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(dict(spec))
    return svg


def _panels(points: Points, sides: Sequence[str], highlighted: Any = None) -> Any:
    """Panel per number of requests with the length on the x axis, two in a row.

    A panel has a line of medians with quartile bars for each side, and the bandwidth limit dashed. Points of different
    panels are not joined. Panels are facets of one chart: Altair takes 2 s per panel for separate ones.
    """
    import altair as alt

    prefill = any(point.role is Role.PREFILL for point in points)
    values: list[dict[str, Any]] = []
    for point, found in points.items():
        place = {"panel": _title(point), "x": point.tokens if prefill else point.length, "point": str(point)}
        for side, row in found.items():
            values.append({**place, "side": side, "us": row.us, "low": row.low, "high": row.high})
        if limit := max((row.limit_us for row in found.values()), default=0.0):
            values.append({**place, "side": LIMIT, "us": limit})
    shown = [*sides, LIMIT] if any(value["side"] == LIMIT for value in values) else list(sides)
    colors = [_GREY if side == LIMIT else COLORS[place % len(COLORS)] for place, side in enumerate(shown)]
    lengths = sorted({value["x"] for value in values})
    base = alt.Chart().encode(
        x=alt.X(
            "x:Q",
            scale=alt.Scale(type="log", base=2, nice=False, domain=[lengths[0] / 1.2, lengths[-1] * 1.2]),
            axis=alt.Axis(values=lengths, labelExpr=_SHORT, grid=False),
            title="new tokens of each request" if prefill else "cache rows of each request",
        ),
        y=alt.Y("us:Q", scale=alt.Scale(type="log", nice=False, padding=8), title="µs of a call"),
        color=alt.Color("side:N", scale=alt.Scale(domain=shown, range=colors), title=None),
        tooltip=["side:N", "point:N", *(alt.Tooltip(f"{name}:Q", format=".2f") for name in ("us", "low", "high"))],
    )
    if highlighted is not None:
        base = base.encode(opacity=alt.condition(highlighted, alt.value(1.0), alt.value(0.12)))
    measured = base.transform_filter(alt.datum.side != LIMIT)
    bars = measured.mark_rule().encode(y=alt.Y("low:Q"), y2="high:Q")
    layers = [bars, measured.mark_line(strokeWidth=1.6), measured.mark_point(filled=True, size=32)]
    if LIMIT in shown:
        layers.append(base.transform_filter(alt.datum.side == LIMIT).mark_line(strokeDash=[5, 4]))
    layered = alt.layer(*layers, data=alt.Data(values=values)).properties(width=_WIDTH, height=_HEIGHT)
    titles = list(dict.fromkeys(value["panel"] for value in values))
    header = alt.Header(title=None, labelFontWeight="bold", labelAnchor="start")
    facet = alt.Facet("panel:N", sort=titles, header=header)
    faceted = layered.facet(facet, columns=min(_COLUMNS, len(titles)))
    return faceted.resolve_scale(y="independent").resolve_axis(x="independent")


def _title(point: Point) -> str:
    """Title of a point's panel: all numbers of the batch but the length."""
    requests = f"{point.requests} request{'s' * (point.requests > 1)}"
    if point.role is Role.PREFILL:
        prefix = point.length - point.tokens
        beside = f", beside {point.decodes} decodes" * bool(point.decodes)
        return (f"{requests}, prefix of {prefix} rows" if prefix else f"{requests}, no prefix") + beside
    return requests + f", {point.tokens} tokens each" * (point.tokens > 1) + ", lengths differ" * point.ragged
