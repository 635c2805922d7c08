"""`npu-node certify`: prove models on the hardware at hand; `npu-node passports`: what was proven."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.cli.output import say
from worker_node.cli.serve import add_config, settings_source
from worker_node.core.errors import ConfigurationError, ModelNotFound

if TYPE_CHECKING:
    from worker_node.devices.probe import Probe
    from worker_node.models.passports import Passport, PassportStore
    from worker_node.settings import ModelSettings, NodeSettings


# A day.
_MOST_MINUTES = 1440


def add_certify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "certify",
        help="prove models on the hardware at hand, and write their passports",
        description="Run every check of docs/certify.md with the models of the settings, or those that are named, on a "
        "device that nobody else uses meanwhile. Exit status: 0 certified or limited, 1 failed.",
    )
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", help="id, alias or source; default: those of the settings"
    )
    add_config(parser)
    parser.add_argument("--device", choices=("NPU", "GPU", "CPU"), help="default: the first that the machine has")
    parser.add_argument(
        "--quick", action="store_true", help="five minutes after compiling: fewer prompts, no endurance"
    )
    parser.add_argument("--endurance", type=_minutes, metavar="MINUTES", help="how long requests are repeated (10)")
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME",
        help="only this check (again for more), for a closer look: the report is not signed and is no passport",
    )
    parser.add_argument(
        "--suspend", action="store_true", help="suspend the machine for 15 s and resume (root, rtcwake)"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="directory of the report and the passport (.)")
    parser.add_argument("--reference", type=Path, help="answers of another CPU, as --make-reference wrote them")
    parser.add_argument(
        "--make-reference",
        type=Path,
        metavar="FILE",
        help="only write this CPU's answers to one MODEL, for --reference",
    )
    parser.set_defaults(run=_certify)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 <= minutes <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_MOST_MINUTES} minutes, got {text}")
    return minutes


def add_passports(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("passports", help="list, show, compare, export and import passports")
    add_config(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all passports that count")
    listing.add_argument(
        "--json", action="store_true", help="as JSON, one array, with each placement of the settings and its state"
    )
    listing.set_defaults(act=_list)
    for name, text, act in (
        ("show", "one passport, as JSON", _show),
        ("export", "one passport, in the form that another node imports", _show),
        ("diff", "what two passports differ in; exit status: 0 nothing, 1 something", _diff),
    ):
        action = actions.add_parser(name, help=text)
        for given in ("name", "other") if act is _diff else ("name",):
            action.add_argument(given, metavar="NAME", help="a name of the list, or a file")
        action.set_defaults(act=act)
    keep = actions.add_parser("import", help="keep a passport that a trusted key signed")
    keep.add_argument("name", metavar="FILE", help="what export printed on another node")
    keep.set_defaults(act=_import)
    actions.add_parser("keys", help="the public keys that are trusted").set_defaults(act=_keys)
    rotate = actions.add_parser("rotate", help="make a new key for this node; what the old one signed still counts")
    rotate.set_defaults(act=_rotate)
    parser.set_defaults(run=_passports)


def _certify(args: argparse.Namespace) -> int:
    import asyncio

    from worker_node.certify.checks import QUICK, Plan
    from worker_node.certify.report import page, summary
    from worker_node.certify.run import Run, certify, left_out, make_reference
    from worker_node.core.types import Device
    from worker_node.devices.npu import npu_users
    from worker_node.devices.probe import probe
    from worker_node.serving.build import passport_store

    settings = settings_source(args).read_without_keys()
    found = asyncio.run(probe())
    device = _device(args.device, settings, found)
    if device == "NPU" and not settings.npu_emulation and (users := npu_users()):
        raise ConfigurationError(
            f"the NPU is used by process {', '.join(map(str, users))}: stop it first (systemctl stop npu-node); a "
            "certification takes the device alone"
        )

    plan = replace(QUICK if args.quick else Plan(), suspend=args.suspend, only=frozenset(args.check))
    if args.endurance is not None:
        plan = replace(plan, endurance_s=60 * args.endurance)
    if args.make_reference is not None:
        if len(args.models) != 1:
            args.parser.error("--make-reference takes one MODEL")
        (wanted,) = _models(args.models, settings)
        _check_writable(args.make_reference.parent)
        make_reference(Run(settings, wanted, Device.CPU, found, plan), args.make_reference, _say)
        return 0

    store, failed = passport_store(settings), False
    if not plan.only:
        store.private_key()
        _check_writable(store.directory)
    _check_writable(args.out)

    for wanted in _models(args.models, settings):
        run = Run(settings, wanted, Device(device), found, plan, args.reference)
        if (problem := left_out(run)) is not None and not args.models:
            _say(f"{wanted.name} is left out: {problem}; to certify it all the same, name it and set allow_known_bad")
            continue
        passport = certify(run, _say)
        what = "report"
        if not plan.only:
            passport, what = store.sign_and_store(passport), "passport"
        stem = passport.file_name.removesuffix(".json")
        (args.out / f"{stem}.{what}.json").write_text(passport.model_dump_json(indent=1) + "\n", encoding="utf-8")
        report = args.out / (f"{stem}.html" if what == "passport" else f"{stem}.{what}.html")
        report.write_text(page(passport), encoding="utf-8")
        print(summary(passport))
        print(f"report: {report}\n")
        failed = failed or passport.verdict == "failed"
    return 1 if failed else 0


def _check_writable(directory: Path) -> None:
    """Raise ConfigurationError now, and not when half an hour's result is to be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigurationError(
            f"results must go to directories that can be written, and {directory} cannot: {error.strerror}"
        ) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _device(given: str | None, settings: NodeSettings, found: Probe) -> str:
    there = ["NPU"] if settings.npu_emulation else []
    there += [name for name in ("NPU", "GPU", "CPU") if found.find(name) is not None]
    if given is not None and given not in there:
        seen = ", ".join(dict.fromkeys(there)) or f"none ({found.error})"
        raise ConfigurationError(
            f"device must be one that OpenVINO sees here ({seen}), got {given}; see npu-node doctor"
        )
    if not there:
        raise ConfigurationError(f"OpenVINO sees no device here ({found.error}); see npu-node doctor")
    return given or there[0]


def _models(names: list[str], settings: NodeSettings) -> list[ModelSettings]:
    """The settings of each model, those of the file where it has some."""
    from worker_node.models.store import ModelStore
    from worker_node.settings import ModelSettings

    if not names:
        return list(settings.models)
    store, found = ModelStore(settings.model_store), []

    def id_of(name: str) -> str:
        try:
            return store.get(name).id
        except ModelNotFound:
            raise ConfigurationError(f"{name} is not installed in {store.root}; run: npu-node pull {name}") from None

    configured = {model.name: model for model in settings.models}
    for model in settings.models:
        # The settings may name a model by an alias.
        if model.path is None:
            with contextlib.suppress(ConfigurationError):
                configured[id_of(model.name)] = model
    for name in names:
        if name not in configured:
            installed = id_of(name)
            found.append(configured.get(installed) or ModelSettings(name=installed))
        else:
            found.append(configured[name])
    return found


def _passports(args: argparse.Namespace) -> int:
    from worker_node.serving.build import passport_store

    return int(args.act(args, passport_store(settings_source(args).read_without_keys())))


def _list(args: argparse.Namespace, store: PassportStore) -> int:
    from worker_node.cli.output import print_json, table

    if args.json:
        print_json(_states(settings_source(args).read_without_keys(), store))
        return 0
    rows = [
        (p.file_name.removesuffix(".json"), p.verdict, p.architecture, p.driver or "-", p.openvino[:24], p.made)
        for p in store.list()
    ]
    print(table(("NAME", "VERDICT", "ARCHITECTURE", "DRIVER", "OPENVINO", "MADE"), rows))
    return 0


def _states(settings: NodeSettings, store: PassportStore) -> list[dict[str, Any]]:
    """Each placement of the settings with its passport, if it has one, then the passports of other placements.

    `configured` is the model's name in the settings, `state` what /health says of the placement; null: it is not used,
    whatever its passport says.
    """
    import asyncio

    from worker_node.devices.npu import npu_source
    from worker_node.devices.probe import probe
    from worker_node.models.store import ModelStore
    from worker_node.serving.build import Machine, installed_model, known_problem, standing_of

    found = asyncio.run(probe())
    passports = {(passport.model, passport.device, passport.emulated): passport for passport in store.list()}
    rows: list[dict[str, Any]] = []
    with npu_source(settings.npu_sysfs, emulated=settings.npu_emulation) as npu:
        machine = Machine(settings, found, npu)
    for wanted in settings.models:
        for device in [place.device for place in wanted.placements or ()] or machine.devices():
            model, emulated = wanted.name, machine.emulates(device)
            state: str | None = None
            try:
                installed = installed_model(wanted, ModelStore(settings.model_store), settings)
                model, reason = installed.id, None if emulated else known_problem(installed, wanted, device, found)
                if reason is None:
                    standing = standing_of(installed, wanted, device, found, settings)
                    state, reason = standing.state, standing.reason
            except ConfigurationError as error:
                reason = error.message
            place = {"configured": wanted.name, "model": model, "device": device.value, "emulated": emulated}
            passport = passports.pop((model, device.value, emulated), None)
            rows.append({**place, "state": state, "reason": reason, **_result(passport)})
    for (model, name, emulated), passport in passports.items():
        unused: dict[str, Any] = {"configured": None, "model": model, "device": name, "emulated": emulated}
        rows.append({**unused, "state": None, "reason": "the settings have no such placement", **_result(passport)})
    return rows


def _result(passport: Passport | None) -> dict[str, Any]:
    if passport is None:
        return {"verdict": None, "max_prompt_tokens": None, "made": None, "failed": []}
    failed = [check.name for check in passport.checks if check.status == "failed"]
    limit = passport.limits.max_prompt_tokens
    return {"verdict": passport.verdict, "max_prompt_tokens": limit, "made": passport.made, "failed": failed}


def _find(store: PassportStore, name: str) -> Passport:
    """A passport of the list, or of a file, which may be one that does not count here."""
    from worker_node.models.passports import Passport

    if Path(name).is_file():
        passport = Passport.read(Path(name).read_bytes())
        try:
            passport.check_signature(store.keys())
        except ConfigurationError as error:
            say(f"{name} would not count here: {error.message}")
        return passport
    for kept in store.list():
        if kept.file_name.removesuffix(".json") == name:
            return kept
    raise ConfigurationError(f"there is no passport {name}; npu-node passports list shows their names")


def _show(args: argparse.Namespace, store: PassportStore) -> int:
    print(_find(store, args.name).model_dump_json(indent=1))
    return 0


def _diff(args: argparse.Namespace, store: PassportStore) -> int:
    """Print what they hold for and what was found, where it differs, and each check with another result."""
    passports = [_find(store, name) for name in (args.name, args.other)]
    one, other = (each.model_dump(mode="json", exclude={"signature", "made", "checks"}) for each in passports)
    differing = [f"{name}: {one[name]} | {other[name]}" for name in one if one[name] != other[name]]

    first, second = ({check.name: check for check in each.checks} for each in passports)
    for name in {**first, **second}:
        before, after = first.get(name), second.get(name)
        if before is None or after is None or before.status != after.status:
            results = ["not made" if check is None else f"{check.status} {check.detail}" for check in (before, after)]
            differing.append(f"{name}: {' | '.join(results)}")
    for line in differing:
        print(line)
    return 1 if differing else 0


def _import(args: argparse.Namespace, store: PassportStore) -> int:
    try:
        content = Path(args.name).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{args.name} cannot be read: {error.strerror}") from None
    print(f"kept: {store.add(content).file_name}")
    return 0


def _keys(_args: argparse.Namespace, store: PassportStore) -> int:
    for key in sorted(store.keys()):
        print(key)
    return 0


def _rotate(_args: argparse.Namespace, store: PassportStore) -> int:
    print(store.rotate())
    return 0
