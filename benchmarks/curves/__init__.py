"""How cost and memory grow: each curve is to be flat or linear. A run with `--page` draws them."""

from functools import partial

from benchmarks.curves import growing, serving
from benchmarks.curves.curve import show


async def _run(measure, _node, store, quick):
    """Measure and print one curve; return it as plain data."""
    curve = await measure(store, quick)
    show(curve)
    return [curve.to_json()]


RUNS = {
    f"curves-{measure.__name__.replace('_', '-')}": partial(_run, measure)
    for measure in (
        growing.waiting_texts,
        growing.client_nodes,
        serving.streams,
        serving.prompts,
        serving.connections,
        serving.models,
    )
}
