"""Passports as npu-node certify signs them, for tests that show what a node makes of them."""

from dataclasses import asdict, replace

from worker_node.core.types import Device
from worker_node.models.passports import Passport
from worker_node.serving.build import identity_of, passport_store
from worker_node.settings import ModelSettings

MADE = "2026-09-01T10:00:00+00:00"


def check(name, status):
    return {"name": name, "status": status, "detail": "", "facts": [], "values": {}}


def passport_for(identity, **more):
    """An unsigned passport of what `identity` says."""
    facts = {
        **asdict(identity),
        "verdict": "certified",
        "made": MADE,
        "node": "here",
        "version": "0.1.0",
        "reference": "this CPU",
        "limits": {"max_prompt_tokens": None},
        "rates": {},
        "checks": [check("load", "passed")],
    }
    return Passport.model_validate(facts | more)


def certify(machine, installed, wanted=None, *, device=Device.NPU, other=None, **verdict):
    """Keep a passport of the model on the device as that is now, or as it was with `other` facts of its identity."""
    wanted = wanted or ModelSettings(name=installed.id)
    identity = identity_of(installed, wanted, device, machine.probe, machine.settings)
    passport = passport_for(replace(identity, **(other or {})), **verdict)
    return passport_store(machine.settings).sign_and_store(passport)
