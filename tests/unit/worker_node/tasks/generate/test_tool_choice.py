"""`tool_choice` in each of OpenAI's forms: which tools the model is told of, and whether it must call one."""

import pytest

from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext
from worker_node.tasks.generate.http.openai import ChatBody
from worker_node.tasks.generate.http.responses import ResponsesBody

CONTEXT = RequestContext("test", 0, 1)


def chat(tools, choice):
    """`choice` is a word, a name, or a mode and names."""
    if isinstance(choice, tuple):
        allowed = [{"type": "function", "function": {"name": name}} for name in choice[1:]]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice[0], "tools": allowed}}
    elif choice not in {"none", "auto", "required", None}:
        choice = {"type": "function", "function": {"name": choice}}
    tools = [{"type": "function", "function": {"name": name}} for name in tools]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    return ChatBody.model_validate(body).requests(CONTEXT)[0].tool_use


def responses(tools, choice):
    if isinstance(choice, tuple):
        allowed = [{"type": "function", "name": name} for name in choice[1:]]
        choice = {"type": "allowed_tools", "mode": choice[0], "tools": allowed}
    elif choice not in {"none", "auto", "required", None}:
        choice = {"type": "function", "name": choice}
    tools = [{"type": "function", "name": name} for name in tools]
    body = {"model": "m", "input": "x", "tools": tools, "tool_choice": choice}
    return ResponsesBody.model_validate(body).request(CONTEXT).tool_use


@pytest.mark.parametrize("dialect", [chat, responses])
@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        (None, ["a", "b", "c"], False),
        ("auto", ["a", "b", "c"], False),
        ("required", ["a", "b", "c"], True),
        ("b", ["b"], True),
        (("auto", "c", "a"), ["a", "c"], False),
        (("required", "b"), ["b"], True),
    ],
)
def test_which_tools_may_be_called(dialect, choice, names, forced):
    use = dialect(["a", "b", "c"], choice)
    assert ([tool.name for tool in use.tools], use.forced) == (names, forced)
    inner = ".function" if dialect is chat else ""
    assert [tool.path for tool in use.tools] == [f"tools[{'abc'.index(n)}]{inner}.parameters" for n in names]


@pytest.mark.parametrize("dialect", [chat, responses])
def test_none_and_no_tools_are_no_tools(dialect):
    assert dialect(["a"], "none") is None
    assert dialect([], "auto") is None


@pytest.mark.parametrize("dialect", [chat, responses])
@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        (["a"], "b", "tool_choice"),
        (["a"], ("auto", "b"), "tool_choice"),
        (["a", "a"], "auto", "tools"),
    ],
)
def test_what_cannot_be_called_is_refused(dialect, tools, choice, param):
    with pytest.raises(BadRequest) as refused:
        dialect(tools, choice)
    assert refused.value.param == param
