"""A model appears whole or not at all, one process at a time makes it, and what dead ones left is removed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker_node.models import store

IDS = ("a", "a-b", "a-b-1")


class Store(RuleBasedStateMachine):
    """Any order of making, publishing, abandoning, removing and sweeping leaves only whole models to be seen."""

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        self.published = set()

    @rule(model=st.sampled_from(IDS))
    def publish(self, model):
        if model not in self.published:
            with store.exclusive(self.root, model):
                work = store.partial(self.root, model)
                (work / "model").mkdir()
                (work / "model" / "weights").write_text(model)
                store.publish(work / "model", self.root / model)
                self.published.add(model)

    @rule(model=st.sampled_from(IDS))
    def abandon(self, model):
        with store.exclusive(self.root, model):
            (store.partial(self.root, model) / "half").write_text("x")

    @rule(model=st.sampled_from(IDS))
    def remove(self, model):
        if model in self.published:
            with store.exclusive(self.root, model):
                store.discard(self.root / model, model)
            self.published.remove(model)

    @rule()
    def sweep(self):
        store.sweep(self.root)
        assert not list(self.root.glob(".partial-*"))

    @invariant()
    def only_whole_models_are_seen(self):
        seen = {path.name for path in self.root.iterdir() if not path.name.startswith(".")}
        assert seen == self.published
        assert all((self.root / model / "weights").read_text() == model for model in seen)

    def teardown(self):
        self.directory.cleanup()


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
