"""What the page says of Intel's compiler is what was compiled, and what becomes worse is found."""

import struct

import msgspec
import pytest

from tests.wine import npu_compiler
from tests.wine.npu_binary import Decoder, Part, parts_of
from tests.wine.npu_compiler import KNOWN, PAGE, PREDICTIONS, ROWS, Result, differences, packaged, read_known, table

GOOD = Result(cpu_s=4, mb=40.0, ms=(20.0, 10.0), tokens_per_s=(50.0, 100.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "Upper bounds are not specified"}, "Upper bounds are not specified"),
        ({"ms": (30.0, 12.6)}, "12.6 ms, it was 10.0 ms"),
        ({"ms": (26.0, 10.0)}, "26.0 ms, it was 20.0 ms"),
        ({"tokens_per_s": (40.0, 79.9)}, "79.9 tokens/s are predicted, it was 100.0"),
        ({"mb": 81.0}, "81.0 MB, it had 40.0 MB"),
    ],
)
def test_a_refusal_a_slower_and_a_larger_binary_are_found(change, words):
    (difference,) = differences("row", GOOD, msgspec.structs.replace(GOOD, **change))
    assert words in difference


@pytest.mark.parametrize(
    "change", [{}, {"ms": (24.9, 12.5)}, {"mb": 80.0}, {"tokens_per_s": (41.0, 80.0)}, {"ms": (1.0, 0.5)}]
)
def test_what_is_as_good_is_no_difference(change):
    assert differences("row", GOOD, msgspec.structs.replace(GOOD, **change)) == []


def test_a_row_without_a_known_result_and_one_that_compiles_now_need_another_table():
    refused = Result(problem="not finished in 150 s")
    assert "not in npu-compiled.json" in differences("row", None, GOOD)[0]
    assert "compiles now" in differences("row", refused, GOOD)[0]
    assert differences("row", refused, refused) == []


def test_the_page_and_the_package_have_the_committed_results():
    known = read_known()
    missing = [f"{row.name} on {name}" for row in ROWS for name in row.platforms if name not in known.get(row.name, {})]
    assert not missing, f"{KNOWN.name} lacks them; run python -m tests.wine.npu_compiler"
    assert table(known) in PAGE.read_text()
    assert packaged(known) == PREDICTIONS.read_bytes()


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The rows and platforms that a command compiles, each with the result GOOD; it writes copies of the files."""
    for path in (KNOWN, PAGE, PREDICTIONS):
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        (name,) = [name for name, value in vars(npu_compiler).items() if value is path]
        monkeypatch.setattr(npu_compiler, name, copy)
    cases = []

    def compile_row(_, row, platforms):
        cases.extend((row.name, platform) for platform in platforms)
        return dict.fromkeys(platforms, GOOD)

    monkeypatch.setattr(npu_compiler, "compile_row", compile_row)
    monkeypatch.setattr(npu_compiler, "windows", lambda: None)
    return cases


def test_one_row_for_one_npu_is_compiled_and_all_others_stay_as_they_are(compiled):
    before, name = read_known(), "embeddings, 32 tokens"
    npu_compiler.main(["--row", name, "--platform", "4000"])
    assert compiled == [(name, "4000")]
    known = read_known()
    assert known == before | {name: before[name] | {"4000": GOOD}}
    assert list(known) == list(before)
    assert table(known) in npu_compiler.PAGE.read_text()
    assert packaged(known) == npu_compiler.PREDICTIONS.read_bytes() != PREDICTIONS.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["--row", "speech, NPU_USE_NPUW", "--platform", "4000"], [("speech, NPU_USE_NPUW", "4000")]),
        (["--row", "rerank", "--platform", "4000"], [("rerank, 128 tokens", "4000"), ("rerank, 512 tokens", "4000")]),
        ([], [(row.name, platform) for row in ROWS for platform in row.platforms]),
    ],
)
def test_a_whole_name_means_one_row_a_part_of_it_several_and_nothing_all(compiled, arguments, cases):
    npu_compiler.main(arguments)
    assert compiled == cases


@pytest.mark.parametrize("arguments", [["--row", "poems"], ["--row", "rerank, 128 tokens", "--platform", "3720"]])
def test_a_name_that_selects_nothing_is_refused(compiled, capsys, arguments):
    with pytest.raises(SystemExit):
        npu_compiler.main(arguments)
    assert "no row has such a name and platform" in capsys.readouterr().err
    assert not compiled


def parts(**milliseconds):
    """Parts by graph and function, each twice as long at the lowest frequency."""
    return [Part(f"Model0_{name}__0", 2 * each, each, 0) for name, times in milliseconds.items() for each in times]


def test_a_token_takes_each_layer_once_and_the_matrix_that_chooses_it():
    short = parts(kv64_FCEW000=[1.0], kv64_REP0011=[0.5], kv64_FCEW001=[0.25], lm_head_FCEW000=[2.0])
    long = parts(kv128_FCEW000=[1.0], kv128_REP0011=[1.0], kv128_FCEW001=[0.25], prefill_FCEW000=[8.0])
    decoder = Decoder.of([*short, *long], layers=11)
    assert decoder.token() == (26.5, 13.25)
    assert decoder.prompt(chunks=1) == (20.0, 10.0)


def test_each_chunk_of_a_prompt_has_the_attention_of_what_came_before():
    found = parts(prefill_FCEW000=[8.0], prefill_REP0011=[3.0, 1.0, 2.0], prefill_REP0022=[0.5], prefill_FCEW001=[1.0])
    decoder = Decoder.of(found, layers=10)
    once = 8.0 + 9 * 0.5 + 1.0
    assert decoder.prompt(chunks=3)[1] == 3 * once + 10 * (1.0 + 2.0 + 3.0)


def test_an_encoder_is_no_decoder():
    assert Decoder.of([Part("torch_jit", 2.0, 1.0, 0)], layers=6) is None


def test_parts_without_a_name_follow_the_graph_that_npuw_names():
    ticks = 38.4 * 1e3
    parts_found = parts_of(
        b"Model0_kv1152\x3f" + elf(3 * ticks) + elf(0.5 * ticks) + elf(ticks) + b"Model0_lm_head\x3f" + elf(2 * ticks)
    )
    assert [(part.name, part.fast_ms) for part in parts_found] == [
        ("Model0_kv1152_FCEW000__0", 3.0),
        ("Model0_kv1152_REP0001__0", 0.5),
        ("Model0_kv1152_FCEW001__0", 1.0),
        ("Model0_lm_head_FCEW000__0", 2.0),
    ]


def elf(ticks):
    """A file for 3720 with as many ticks at each frequency, and 1 KiB of memory on the device."""
    contents = {
        "": b"",
        ".compatibility_string": b"npu=3720;",
        ".perf.metrics": bytes(16) + struct.pack("<25Q", *[round(ticks)] * 25),
        ".buffer.DDR": b"",
    }
    names = b"".join(name.encode() + b"\0" for name in (*contents, ".names"))
    contents[".names"] = names
    header, body, table = 64, b"", b""
    for name, content in contents.items():
        size = 1024 if name == ".buffer.DDR" else len(content)
        at = names.find(name.encode() + b"\0")
        table += struct.pack("<IIQQQQIIQQ", at, 0, 0, 0, header + len(body), size, 0, 0, 0, 0)
        body += content
    start = b"\x7fELF" + bytes(36) + struct.pack("<Q", header + len(body))
    return start.ljust(58, b"\0") + struct.pack("<HHH", 64, len(contents), len(contents) - 1) + body + table


def test_a_part_has_its_memory_on_the_device():
    (part,) = parts_of(b"weights" + elf(38_400) + bytes(100))
    assert (part.fast_ms, part.slow_ms, part.device_bytes) == (1.0, 1.0, 1024)
    assert parts_of(b"\x7fELF" + bytes(80)) == []
