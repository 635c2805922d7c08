"""Every value of every pair of Arrow types is in the output as it was in the input, or the job is refused at the start.

The oracle knows nothing of types: it compares Python's numbers, which compare exactly, and reads text back.
"""

import datetime
import itertools
import random
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.bulk.inputs import list_inputs
from backend_client.bulk.readers import parquet
from backend_client.bulk.types import Kind, NoCommonType, common_type, conform, json_of

NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
NAN_FREE = [0.0, 1.5, -0.1, 5e-324, 1.7976931348623157e308, float("inf"), 2.0**53 + 2, 1e22]


def ticks(type_, values):
    return pa.array(values, pa.int64()).cast(type_)


def temporal_columns():
    for unit, size in NANOSECONDS.items():
        # Parquet has no seconds, but milliseconds.
        most = 2**63 // 1000 - 1 if unit == "s" else 2**63 - 1
        for zone in (None, "UTC", "Europe/Berlin"):
            kind = pa.timestamp(unit, zone)
            yield ticks(kind, [-most // 2, 0, 1, most]), ticks(kind, [-1, 0, 1000])
        kind = pa.duration(unit)
        yield ticks(kind, [-(2**63) + 1, 2**63 - 1]), ticks(kind, [-1, 0, 1000])
        day = pa.time32(unit) if unit in {"s", "ms"} else pa.time64(unit)
        whole = 86400 * 10**9 // size
        storage = pa.int32() if unit in {"s", "ms"} else pa.int64()
        yield pa.array([0, whole - 1], storage).cast(day), pa.array([1], storage).cast(day)
    yield pa.array([-(2**31), 2**31 - 1], pa.int32()).cast(pa.date32()), pa.array([1], pa.int32()).cast(pa.date32())


def number_columns():
    for bits in (8, 16, 32, 64):
        signed, unsigned = getattr(pa, f"int{bits}")(), getattr(pa, f"uint{bits}")()
        odd = [2**53 + 1, -(2**53) - 1] if bits == 64 else []
        yield pa.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, *odd], signed), pa.array([-1, 0, 100], signed)
        yield pa.array([0, 2**bits - 1, *odd[:1]], unsigned), pa.array([0, 100], unsigned)
    yield pa.array(NAN_FREE), pa.array([0.5])
    yield pa.array([0.1, 3.4028234e38, 2.0**24], pa.float32()), pa.array([0.5], pa.float32())
    yield pa.array([0.1, 65504.0, 2.0**11]).cast(pa.float16()), pa.array([0.5]).cast(pa.float16())
    for precision, scale in ((5, 2), (22, 2), (38, 0), (38, 38), (38, 10)):
        kind = pa.decimal128(precision, scale)
        # As text: Decimal's own operators round to 28 digits.
        most = "9" * (precision - scale) + "." + "9" * scale
        yield pa.array([Decimal(most), Decimal(f"-{most}")], kind), pa.array([Decimal(0)], kind)
    wide = pa.decimal256(60, 5)
    yield pa.array([Decimal("9" * 55 + ".99999")], wide), pa.array([Decimal(1)], wide)
    narrow = pa.decimal64(12, 3)
    yield pa.array([Decimal("123456789.012")]).cast(narrow), pa.array([Decimal("1.000")]).cast(pa.decimal64(12, 3))


def other_columns():
    texts = ["", "1", "ä\U0001f600", "true", '"x"']
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        yield pa.array(texts, kind), pa.array(["x"], kind)
    yield pa.array(texts).dictionary_encode(), pa.array(["x"]).dictionary_encode()
    yield pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])), pa.array(["x"])
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2), pa.binary(3)):
        value = [b"\xff\x00", b"ab"] if kind != pa.binary(3) else [b"\xff\x00a"]
        yield pa.array(value, kind), pa.array(value[:1], kind)
    yield pa.array([True, False]), pa.array([True])
    yield pa.nulls(2), pa.nulls(1)


def nested_columns():
    large, small = [2**63 - 1, 2**53 + 1], [1, 2]
    for kind, values, few in (
        (pa.int64(), large, small),
        (pa.float64(), [0.1, 1e300], [0.5, 1.0]),
        (pa.uint64(), [2**64 - 1, 0], small),
        (pa.string(), ["a", "1"], ["x", "y"]),
        (pa.binary(), [b"\xff", b""], [b"x", b"y"]),
    ):
        for made in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, 2), pa.list_view(kind)):
            yield pa.array([values, None], made), pa.array([few, None], made)
        yield pa.array([[values, None], None], pa.list_(pa.list_(kind))), pa.array([[few]], pa.list_(pa.list_(kind)))
        struct = pa.struct([("a", kind), (f"only_{kind}", pa.bool_())])
        yield (
            pa.array([{"a": value, f"only_{kind}": True} for value in values] + [None], struct),
            pa.array([{"a": value} for value in few], struct),
        )
        mapping = pa.map_(pa.string(), kind)
        yield pa.array([[("k", value) for value in values], None], mapping), pa.array([[("k", few[0])]], mapping)


class Single(float):
    """A float of 32 bits, also of its text."""

    def __new__(cls, value):
        return super().__new__(cls, np.float32(value))


def exact(array):
    """Values that compare exactly: moments and spans as whole nanoseconds, which Python's own types do not have."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        size, local = NANOSECONDS[kind.unit], kind.tz is None
        return [("at", local, tick * size) for tick in array.cast(pa.int64()).to_pylist()]
    if pa.types.is_duration(kind):
        return [tick * NANOSECONDS[kind.unit] for tick in array.cast(pa.int64()).to_pylist()]
    if pa.types.is_time(kind):
        storage = pa.int32() if kind.bit_width == 32 else pa.int64()
        return [("time", tick * NANOSECONDS[kind.unit]) for tick in array.cast(storage).to_pylist()]
    if pa.types.is_date(kind):
        days = array.cast(pa.date32()).cast(pa.int32()).to_pylist()
        return [("day", day) for day in days]
    if pa.types.is_float32(kind):
        return [Single(value) for value in array.to_pylist()]
    return array.to_pylist()


def is_same(value, found):
    """Whether what is in the output is the value of the input."""
    if isinstance(value, dict):
        return isinstance(found, dict) and all(
            is_same(value.get(name), part) if name in value else part is None for name, part in found.items()
        )
    if isinstance(value, list | tuple) and isinstance(found, list | tuple):
        return len(value) == len(found) and all(map(is_same, value, found))
    if isinstance(found, bytes) and isinstance(value, str):
        return value.encode() == found
    if isinstance(found, str) and not isinstance(value, str):
        return value is not None and reads_as(found, value)
    return (type(value) is not bool and type(found) is not bool and value == found) or value is found


def reads_as(text, value):
    if isinstance(value, bool):
        return text == ("true" if value else "false")
    if not isinstance(value, tuple):
        return type(value)(text) == value
    what, *_, number = value
    if what == "time":
        hours, minutes, seconds = text.split(":")
        return (int(hours) * 60 + int(minutes)) * 60 * 10**9 + int(Decimal(seconds) * 10**9) == number
    years = int(text[: text.index("-", 1)])
    # Python's calendar ends at the year 9999: it repeats every 400 years, which are 146,097 days.
    cycles = (years - 2000) // 400
    day = datetime.date(years - 400 * cycles, *map(int, text[text.index("-", 1) + 1 :][:5].split("-")))
    days = day.toordinal() - datetime.date(1970, 1, 1).toordinal() + 146_097 * cycles
    if what == "day":
        return days == number
    clock = text.split(" ")[1]
    zone = 0
    if not value[1]:
        clock, zone = (clock[:-1], 0) if clock.endswith("Z") else (clock[:-5], int(clock[-4:-2]) * 60 + int(clock[-2:]))
        zone = -zone if "-" in text.split(" ")[1] else zone
    hours, minutes, seconds = clock.split(":")
    nanoseconds = ((days * 24 + int(hours)) * 60 + int(minutes) - zone) * 60 * 10**9 + int(Decimal(seconds) * 10**9)
    return nanoseconds == number


COLUMNS = [*number_columns(), *temporal_columns(), *other_columns(), *nested_columns()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(kind, column as it is read, whether statistics tell that it is harmless), with and without them."""
    folder = tmp_path_factory.mktemp("types")
    found = []
    for number, ((extreme, harmless), statistics) in enumerate(itertools.product(COLUMNS, (True, False))):
        for name, column in (("extreme", extreme), ("harmless", harmless)):
            path = folder / f"{number}-{name}.parquet"
            pq.write_table(pa.table({"c": column}), path, write_statistics=statistics, row_group_size=1)
            (kind,) = parquet.columns(list_inputs(str(path))[0], None)[1]
            table = pq.read_table(path).cast(pa.schema([("c", kind.type)]))
            found.append((kind, table.column("c").combine_chunks(), statistics and name == "harmless"))
    return found


def held(made, column):
    return conform(pa.table({"c": column}), pa.schema([("c", made)])).column("c").combine_chunks()


def assert_holds(made, column):
    inside = held(made, column)
    assert inside.is_null().equals(column.is_null())
    for value, found in zip(exact(column.drop_null()), exact(inside.drop_null()), strict=True):
        assert is_same(value, found), (column.type, made, value, found)


def test_each_pair_of_types_has_one_that_holds_every_value_of_both_or_none(files):
    """About 60,000 pairs would take a minute: types of one family with each other, and every twentieth of the rest."""
    refused = held_pairs = 0
    pairs = list(itertools.combinations(files, 2))
    random.Random(1).shuffle(pairs)
    near = [pair for pair in pairs if family(pair[0][0].type) == family(pair[1][0].type)]
    far = [pair for pair in pairs if family(pair[0][0].type) != family(pair[1][0].type)][::20]
    for one, other in near[:5000] + far:
        try:
            made = common_type([one[0], other[0]])
        except NoCommonType:
            assert may_be_refused(one[0].type, other[0].type, one[2] and other[2]), (one[0].type, other[0].type)
            refused += 1
            continue
        assert_holds(made, one[1])
        assert_holds(made, other[1])
        held_pairs += 1
    assert refused > 100
    assert held_pairs > 1000


def family(type_):
    if pa.types.is_nested(type_):
        return str(type_).partition("<")[0].replace("large_", "").replace("fixed_size_", "").replace("_view", "")
    if "binary" in str(type_):
        return "bytes"
    if isinstance(type_, pa.BaseExtensionType) or pa.types.is_dictionary(type_) or "string" in str(type_):
        return "text"
    if pa.types.is_temporal(type_):
        return "duration" if pa.types.is_duration(type_) else "moment"
    return "number"


def may_be_refused(one, other, harmless):
    """Bytes, spans of time and nested values have no type in common with all else, nor dates that text cannot tell."""
    families = {family(one), family(other)}
    if families == {"bytes", "text"}:
        return False
    return bool(families & {"bytes", "duration", "list", "struct", "map"}) or ("moment" in families and not harmless)


def test_the_type_depends_on_no_order_and_holds_three_kinds_as_well(files):
    choose = random.Random(2)
    simple = [entry for entry in files if not pa.types.is_nested(entry[0].type)]
    for _ in range(1500):
        some = choose.sample(simple, 3)
        found = set()
        for order in itertools.permutations(some):
            try:
                found.add(common_type([kind for kind, *_ in order]))
            except NoCommonType:
                found.add(None)
        (made,) = found
        for _, column, _ in some if made is not None else ():
            assert_holds(made, column)


SMALL, LARGE = (-(2**53), 2**53), (0, 2**60)


@pytest.mark.parametrize(
    ("kinds", "made"),
    [
        ([Kind(pa.int8()), Kind(pa.uint8())], pa.int16()),
        ([Kind(pa.int64()), Kind(pa.float64())], pa.string()),
        ([Kind(pa.int64(), LARGE), Kind(pa.float64())], pa.string()),
        ([Kind(pa.int64(), SMALL), Kind(pa.float32())], pa.float64()),
        ([Kind(pa.int32()), Kind(pa.float32())], pa.float64()),
        ([Kind(pa.uint64()), Kind(pa.int64())], pa.decimal128(20, 0)),
        ([Kind(pa.uint64(), LARGE), Kind(pa.int64())], pa.int64()),
        ([Kind(pa.uint64()), Kind(pa.int64(), (0, 1))], pa.uint64()),
        ([Kind(pa.decimal128(22, 2)), Kind(pa.float64())], pa.string()),
        ([Kind(pa.decimal128(5, 2)), Kind(pa.int64())], pa.decimal128(21, 2)),
        ([Kind(pa.decimal128(38, 2)), Kind(pa.int64())], pa.decimal128(38, 2)),
        ([Kind(pa.decimal128(38, 30)), Kind(pa.int64())], pa.string()),
        ([Kind(pa.timestamp("us"), LARGE), Kind(pa.timestamp("ns"))], None),
        ([Kind(pa.timestamp("us"), SMALL), Kind(pa.timestamp("ns"))], pa.timestamp("ns")),
        ([Kind(pa.timestamp("s"), (0, 2**33)), Kind(pa.timestamp("ns"))], pa.timestamp("ns")),
        ([Kind(pa.timestamp("s"), (0, 2**35)), Kind(pa.timestamp("ns"))], pa.string()),
        ([Kind(pa.timestamp("s", "UTC")), Kind(pa.timestamp("s", "Asia/Tokyo"))], pa.timestamp("s", "UTC")),
        ([Kind(pa.binary()), Kind(pa.string())], pa.binary()),
        ([Kind(pa.binary()), Kind(pa.int64())], None),
        ([Kind(pa.string()), Kind(pa.int64()), Kind(pa.binary())], None),
    ],
)
def test_chosen_types_are_those_that_are_documented(kinds, made):
    try:
        found = common_type(kinds)
    except NoCommonType:
        found = None
    assert found == made


def test_values_become_json_where_a_column_of_json_lines_is_json_text():
    columns = [
        pa.array(['a"b', None]),
        pa.array([2**60, None]),
        pa.array([0.1, float("nan"), float("inf")]),
        pa.array([True]),
        pa.array([Decimal("1.20")]),
        pa.array([datetime.date(2020, 1, 2)]),
    ]
    assert [json_of(column).to_pylist() for column in columns] == [
        ['"a\\"b"', None],
        [str(2**60), None],
        ["0.1", "NaN", "Infinity"],
        ["true"],
        ["1.20"],
        ['"2020-01-02"'],
    ]
