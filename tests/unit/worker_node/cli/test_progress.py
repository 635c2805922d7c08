"""The progress of a pull: one line on a terminal of any width, no more than all, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from worker_node.cli.output import progress_display

_TITLE = "openvino-qwen2.5-coder-7b-instruct-int4-cw-ov"


def shown(width, *calls, title=_TITLE):
    """What a terminal of that width shows after the calls: the lines of the last picture."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, height=10, color_system=None)
    with progress_display(title, screen) as progress:
        for name, *arguments in calls:
            getattr(progress, name)(*arguments)
        picture = Console(file=io.StringIO(), width=width)
        picture.print(progress._progress.get_renderable())
    return picture.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_takes_one_line_of_any_width(width):
    lines = shown(width, ("stage", "downloading openvino-qwen2.5-coder 1.0.0", 92_871_040), ("update", 92_000_000))
    assert len(lines) == 1
    assert len(lines[0]) <= width
    assert "92.0 MB of 92.9 MB" in lines[0]


def test_output_that_is_no_terminal_gets_a_line_for_each_stage(capsys):
    with progress_display("mine") as progress:
        progress.stage("downloading", 92_871_040)
        progress.update(1000)
        progress.stage("converting")
    assert capsys.readouterr().err == "mine: downloading (93 MB)\nmine: converting\n"
