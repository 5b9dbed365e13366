"""Any order of events beside a kvstore: lookups and transfers end late, twice, short or never.

The machine of `test_scheduler.py` with a kvstore: the same invariants, and every block that a
store reads or a load fills is compared with what the tokens behind its hash leave there.
"""

from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec.structs import replace

from deepmesh.wire.messages import Hits, KvStatus, OpDone, Resume
from services.scheduler.core import kv_stores
from services.scheduler.core.store_writes import DEADLINE_NS
from services.scheduler.sim.store import Contents
from tests.core.driver import CONFIG, EXECUTOR, SECOND
from tests.core.store_driver import KVSTORE, StoreDriver
from tests.property.test_scheduler import PREFIX, SchedulerMachine


@cache
def stored(one_class: bool) -> Contents:
    """What a kvstore has of the common prefix: points at 16, 32 and 48."""
    driver = StoreDriver(one_kernel_class=one_class)
    for end in (20, 40, 60):
        driver.ask(PREFIX[:end], max_tokens=1)
    driver.run()
    return driver.contents


class StoreMachine(SchedulerMachine):
    """One core, one small device, one kvstore; the test decides what each of them does next."""

    driver: StoreDriver

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        blocks=st.integers(10, 30),
        windows=st.integers(6, 16),
        states=st.integers(2, 6),
        slots=st.integers(1, 5),
        draft_len=st.sampled_from([0, 0, 3]),
        one_class=st.booleans(),
        halo=st.sampled_from([0, 22]),
        warm=st.booleans(),
        first=st.lists(st.sampled_from([10, 30, 50, 64]), min_size=1, max_size=4),
    )
    def start(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        depth: int,
        blocks: int,
        windows: int,
        states: int,
        slots: int,
        draft_len: int,
        one_class: bool,
        halo: int,
        warm: bool,
        first: list[int],
    ) -> None:
        config = replace(CONFIG, depth=depth, max_rows=4, step_tokens=32, hang_s=3600)
        contents = Contents()
        if warm:
            contents.items.update(stored(one_class).items)
        driver = StoreDriver(
            config,
            auto=False,
            contents=contents,
            num_global_blocks=blocks,
            num_window_blocks=windows,
            num_state_blocks=states,
            num_slots=slots,
            draft_len=draft_len,
            one_kernel_class=one_class,
            prefill_halo=halo,
            max_model_len=80,
        )
        self.begin(driver, depth)
        self.answered: list[OpDone] = []
        for shared in first:
            self.driver.ask([*PREFIX[:shared], shared], min(12, blocks * 8 - 65))

    @rule(count=st.integers(1, 12), ends=st.booleans())
    def steps(self, count: int, ends: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With `ends`, transfers end beside the steps; lookups are answered in any case."""
        for _ in range(count):
            self.driver.step()
            while self.driver.lookups:
                self.driver.answer()
            if ends:
                self.driver.settle()

    # ------------------------------------------------------------ the kvstore

    @precondition(lambda self: self.driver.lookups)
    @rule()
    def answer_a_lookup(self) -> None:
        self.driver.answer()

    @precondition(lambda self: self.driver.lookups)
    @rule(blocks=st.integers(-1, 12), point=st.integers(-1, 12))
    def answer_nonsense(self, blocks: int, point: int) -> None:
        lookup = self.driver.lookups.popleft()
        self.driver.mail(Hits(lookup.lookup_id, blocks, point), KVSTORE)

    @rule()
    def lose_or_regain_the_kvstore(self) -> None:
        if self.driver.is_up:
            self.driver.kvstore_down(empty=False)
        else:
            self.driver.kvstore_up()

    @rule(num_items=st.integers(0, 12))
    def the_kvstore_tells_how_much_it_has(self, num_items: int) -> None:
        """Less, too, than it may have got since."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_stores, "NEW_ITEMS", 0)
            self.driver.kvstore_holds(num_items)

    @rule()
    def the_kvstore_forgets(self) -> None:
        self.driver.contents = Contents()

    # ------------------------------------------------------------ transfers

    @precondition(lambda self: self.driver.runnable_ops())
    @rule(data=st.data(), lost=st.sets(st.integers(0, 8), max_size=2))
    def end_a_transfer(self, data: st.DataObject, lost: set[int]) -> None:
        op = data.draw(st.sampled_from(self.driver.runnable_ops()))
        self.answered.append(self.driver.end(op, lost=lost))

    @precondition(lambda self: self.driver.runnable_ops())
    @rule(data=st.data(), status=st.sampled_from([KvStatus.ERROR, KvStatus.FULL]))
    def fail_a_transfer(self, data: st.DataObject, status: KvStatus) -> None:
        op = data.draw(st.sampled_from(self.driver.runnable_ops()))
        self.answered.append(self.driver.end(op, status=status))

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def repeat_an_answer(self, data: st.DataObject) -> None:
        self.driver.mail(data.draw(st.sampled_from(self.answered)), EXECUTOR)

    @rule()
    def everything_ends(self) -> None:
        self.driver.settle()

    @precondition(lambda self: self.waited_s < 40)
    @rule()
    def loads_run_out_of_time(self) -> None:
        self.waited_s += 3
        self.driver.tick(seconds=2.1)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        if self.driver.lost:
            self.driver.regain_tokenizer()
        self.driver.mail(Resume(), "operator")
        self.driver.tick(seconds=DEADLINE_NS / SECOND)  # what hangs until now counts as stuck
        self.driver.auto = True
        self.driver.settle()
        self._let_all_end()
        self.driver.settle()
        self.driver.assert_clean()
        assert sum(self.driver.pinned()) == 0


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
