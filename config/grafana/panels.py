"""The kinds of panels that the dashboards are made of: what every one of them has, in one place.

Every panel has a unit, a description, and a legend whose entries can be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)

P = TypeVar("P", stat.Panel, statetimeline.Panel, timeseries.Panel)

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# As many of a row's 24 columns as these are wide.
THIRD, HALF, EIGHTH = 8, 12, 3

# A query and the legend of its series.
Query = tuple[str, str]
# The value from which on a colour holds; None is the base.
Step = tuple[float | None, str]

GREEN: Sequence[Step] = ((None, "green"),)


def at_most(warning: float, critical: float) -> Sequence[Step]:
    """Green below `warning`, red from `critical` on."""
    return ((None, "green"), (warning, "orange"), (critical, "red"))


def graph(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    thresholds: Sequence[Step] = (),
    highest: float | None = None,
    stacked: StackingMode = StackingMode.NONE,
    width: int = THIRD,
) -> timeseries.Panel:
    """Values over time, from 0 up."""
    panel = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(10)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .stacking(common.StackingConfig().mode(stacked))
    )
    if highest is not None:
        panel.max(highest)
    if thresholds:
        panel.thresholds(_thresholds(thresholds))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    return _finished(panel, title, description, unit, queries, width, height=8)


def number(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    thresholds: Sequence[Step] = GREEN,
    mappings: Mapping[int, tuple[str, str]] | None = None,
    named: bool = False,
    width: int = EIGHTH,
) -> stat.Panel:
    """One number, or one for each series with its name beside it (`named`)."""
    panel = (
        stat.Panel()
        .thresholds(_thresholds(thresholds))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE if named or mappings else BigValueGraphMode.AREA)
        .text_mode(BigValueTextMode.VALUE_AND_NAME if named else BigValueTextMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )
    if mappings:
        panel.mappings([_mapping(mappings)])
    return _finished(panel, title, description, unit, [query], width, height=4)


def states(
    title: str, description: str, query: Query, mapping: Mapping[int, tuple[str, str]], *, width: int = HALF
) -> statetimeline.Panel:
    """The state of each series over time; `mapping` gives each value its name and colour."""
    panel = (
        statetimeline.Panel()
        .mappings([_mapping(mapping)])
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .show_value(VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    return _finished(panel, title, description, "none", [query], width, height=8)


def board(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """An empty dashboard over a Prometheus that is chosen on it."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["npu-node", "generated"])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            dashboard.DashboardLink("NPU dashboards")
            .type("dashboards")
            .tags(["npu-node"])
            .as_dropdown(False)
            .include_vars(True)
            .keep_time(True)
        )
    )


def choice(name: str, label: str, values: str) -> dashboard.QueryVariable:
    """A variable whose values are those of a label, as `label_values(metric, label)` gives them."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": values, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def quantiles(metric: str, by: str, legend: str, selector: str = "") -> tuple[Query, Query]:
    """The median and the 95th percentile of a histogram, by these labels."""
    rate = f"sum by ({by}, le) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    half = f"histogram_quantile(0.5, {rate})"
    most = f"histogram_quantile(0.95, {rate})"
    return (half, f"{legend} median"), (most, f"{legend} 95 %")


def _finished(
    panel: P, title: str, description: str, unit: str, queries: Sequence[Query], width: int, height: int
) -> P:
    panel.title(title).description(description).unit(unit).datasource(DATASOURCE).span(width).height(height)
    for ref, (expression, legend) in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(
            prometheus.Dataquery().ref_id(ref).expr(expression).legend_format(legend).range().datasource(DATASOURCE)
        )
    return panel


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=color) for value, color in steps])
    )


def _mapping(values: Mapping[int, tuple[str, str]]) -> ValueMap:
    options = {
        str(value): ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(values.items())
    }
    return ValueMap(options=options)
