"""The tree against its model, with verbs and arguments that Hypothesis chooses and shrinks."""

from struct import pack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.tree_world import NAMESPACES, Held, World

namespaces = st.sampled_from(NAMESPACES)
suffixes = st.lists(st.sampled_from((1, 2)), max_size=8).map(lambda ids: pack(f"<{len(ids)}i", *ids))
fractions = st.integers(0, 16)


class TreeMachine(RuleBasedStateMachine):
    """Prompts are parts of sequences that are cached, and a suffix: random ones would share nothing."""

    world: World

    @initialize(page_size=st.sampled_from((1, 2, 4)))
    def begin(self, page_size: int) -> None:
        self.world = World(page_size)

    def prompt(self, index: int, fraction: int, suffix: bytes) -> bytes:
        known = [tokens for _, tokens in self.world.cached]
        stem = known[index % len(known)] if known else b""
        return stem[: len(stem) // 4 * fraction // 16 * 4] + suffix

    def chosen(self, index: int) -> Held:
        return self.world.held[index % len(self.world.held)]

    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def match(self, namespace, index, fraction, suffix):
        self.world.match(namespace, self.prompt(index, fraction, suffix))

    @precondition(lambda self: len(self.world.held) < 8)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def start(self, namespace, index, fraction, suffix):
        """A request: leases what is cached of its prompt, and commits the rest."""
        tokens = self.prompt(index, fraction, suffix)
        held = self.world.lease(namespace, tokens)
        self.world.commit(held, tokens[len(held.tokens) :])

    @precondition(lambda self: len(self.world.held) < 7)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def start_twice_in_one_step(self, namespace, index, fraction, suffix):
        """Both leased before either commits: the second finds the first one's pages."""
        tokens = self.prompt(index, fraction, suffix)
        pair = [self.world.lease(namespace, tokens) for _ in range(2)]
        for held in pair:
            self.world.commit(held, tokens[len(held.tokens) :])

    @precondition(lambda self: self.world.held)
    @rule(index=st.integers(0), suffix=suffixes)
    def commit(self, index, suffix):
        self.world.commit(self.chosen(index), suffix)

    @precondition(lambda self: self.world.held)
    @rule(index=st.integers(0), suffix=suffixes)
    def extend(self, index, suffix):
        self.world.extend(self.chosen(index), suffix)

    @precondition(lambda self: 0 < len(self.world.held) < 8)
    @rule(index=st.integers(0))
    def fork(self, index):
        self.world.fork(self.chosen(index))

    @precondition(lambda self: self.world.held)
    @rule(index=st.integers(0))
    def release(self, index):
        self.world.release(self.chosen(index))

    @precondition(lambda self: self.world.held)
    @rule(index=st.integers(0))
    def finish(self, index):
        """A request whose rows were all finite: what it held can be evicted now."""
        held = self.chosen(index)
        self.world.mark_computed(held, len(held.tokens) // 4)
        self.world.release(held)

    @precondition(lambda self: self.world.held)
    @rule(index=st.integers(0), n_tokens=st.integers(0, 40))
    def mark_computed(self, index, n_tokens):
        self.world.mark_computed(self.chosen(index), n_tokens)

    @precondition(lambda self: self.world.held)
    @rule(index=st.integers(0))
    def detach_uncomputed(self, index):
        self.world.detach_uncomputed(self.chosen(index))

    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions)
    def detach(self, namespace, index, fraction):
        self.world.detach(namespace, self.prompt(index, fraction, b""))

    @rule(n_pages=st.integers(0, 8))
    def evict(self, n_pages):
        self.world.evict(n_pages)

    @invariant()
    def both_agree(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """Idle, and then empty: no page is lost."""
        if not hasattr(self, "world"):
            return
        for held in list(self.world.held):
            self.world.release(held)
        self.world.check()
        assert self.world.tree.n_pages_leased == self.world.tree.n_pages_detached == 0
        self.world.evict(1000)
        self.world.check()
        assert self.world.tree.namespaces() == []


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
