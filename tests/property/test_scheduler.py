"""Any order of events: all invariants hold after each, and every request gets its own tokens.

`Driver.feed` audits after every event, checks every read against shadow KV, and lets the external
writer fill whatever became free.
"""

from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from deepmesh.wire.messages import Abort, Pause, Resume, StepStatus
from services.scheduler.core.audit import audit
from services.scheduler.sim.coverage import state_of
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import CONFIG, EXECUTOR, TOKENIZER, Driver, words

PREFIX = words(64, seed=7)
# States that pass quickly come first when one of the requests is to be aborted.
RARE = ("preempt pending", "preempted", "waiting for a prefix", "parked", "without an engine")


class SchedulerMachine(RuleBasedStateMachine):
    """One core on a small device; at the end everything is allowed to finish."""

    driver: Driver
    reached: ClassVar[Counter[tuple[int, str]]] = Counter()  # of all cases so far, by depth

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        blocks=st.integers(10, 24),
        windows=st.integers(6, 16),
        states=st.integers(1, 6),
        slots=st.integers(1, 5),
        cache=st.booleans(),
        step_tokens=st.sampled_from([16, 32, 64]),
        draft_len=st.sampled_from([0, 0, 3]),
        one_class=st.booleans(),
        halo=st.sampled_from([0, 22]),
        max_unacked=st.sampled_from([6, 2048, 2048]),
        crowd=st.lists(
            st.tuples(st.sampled_from([0, 0, 17, 40]), st.integers(1, 14), st.integers(6, 20)),
            max_size=4,
        ),
    )
    def start(
        self,
        depth: int,
        blocks: int,
        windows: int,
        states: int,
        slots: int,
        cache: bool,
        step_tokens: int,
        draft_len: int,
        one_class: bool,
        halo: int,
        max_unacked: int,
        crowd: list[tuple[int, int, int]],
    ) -> None:
        config = replace(
            CONFIG,
            depth=depth,
            max_rows=4,
            prefix_cache=cache,
            step_tokens=step_tokens,
            hang_s=3600,  # here a device may be slow for as long as the case likes
        )
        driver = Driver(
            config,
            max_unacked=max_unacked,
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
        for shared, own, max_tokens in crowd:
            prompt = PREFIX[:shared] + words(own, seed=own)
            self.driver.ask(prompt, min(max_tokens, 79 - len(prompt)))

    def begin(self, driver: Driver, depth: int) -> None:
        """What all rules rely on."""
        self.driver, self.depth = driver, depth
        self.waited_s = 0
        self.is_paused = False
        self.attaches = 0

    # ------------------------------------------------------------ tokenizer

    @rule(
        shared=st.integers(0, 50),
        own=st.integers(1, 30),
        max_tokens=st.integers(1, 30),
        stops=st.booleans(),
        grammar=st.booleans(),
        priority=st.integers(0, 1),
    )
    def ask(
        self, shared: int, own: int, max_tokens: int, stops: bool, grammar: bool, priority: int
    ) -> None:
        if len(self.driver.requests) < 12 and not self.driver.lost:
            self.driver.ask(
                PREFIX[:shared] + words(own, seed=own),
                min(max_tokens, 80 - shared - own) or 1,
                stop_ids=frozenset(range(12)) if stops else frozenset(),
                grammar=grammar,
                priority=priority,
            )

    def pick(self, data: st.DataObject) -> SimRequest | None:
        requests = list(self.driver.requests.values())
        return data.draw(st.sampled_from(requests)) if requests else None

    @rule(rare=st.booleans(), at=st.integers(0, 11))
    def abort(self, rare: bool, at: int) -> None:
        """One of the requests, in whatever state; or one that is in a rare state."""
        driver = self.driver
        states = [(state_of(driver.core, r.rid), r) for r in driver.requests.values()]
        if rare:
            states = [pair for name in RARE for pair in states if pair[0] == name][:1]
        if not states:
            return
        state, request = states[at % len(states)]
        self.reached[self.depth, f"abort: {state}"] += 1
        if driver.lost:  # another tokenizer says so, which knows of no attempt
            driver.mail(Abort(request.rid), "tokenizer-1")
        else:
            driver.abort(request)

    @rule(data=st.data(), keep=st.integers(1, 20))
    def stop_at(self, data: st.DataObject, keep: int) -> None:
        request = self.pick(data)
        if request and not self.driver.lost and len(request.output) >= keep:
            if not request.terminals:
                request.stop_at = keep
            self.driver.stop_at(request, keep)

    @rule(data=st.data())
    def ack_and_attach(self, data: st.DataObject) -> None:
        request = self.pick(data)
        if request is not None and not self.driver.lost:
            self.driver.ack(request)
            if not request.terminals:
                self.driver.attach(request, max(0, len(request.output) - 2))
                self.attaches += 1

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        request = self.pick(data)
        if request is not None and not self.driver.lost and not request.terminals:
            request.attempt += 1
            self.driver.mail(request.generate(TOKENIZER))

    @rule()
    def lose_or_regain_the_tokenizer(self) -> None:
        if self.driver.lost:
            self.driver.regain_tokenizer()
        else:
            self.driver.lose_tokenizer()

    @rule()
    def pause_or_resume(self) -> None:
        self.is_paused = not self.is_paused
        self.driver.mail(Pause() if self.is_paused else Resume(), "operator")

    # ------------------------------------------------------------ device

    @rule()
    def tick(self) -> None:
        self.driver.tick()

    @precondition(lambda self: self.driver.steps and not self.driver.tails)
    @rule(miss=st.booleans())
    def body(self, miss: bool) -> None:
        if not miss:
            self.driver.body()
            return
        step = self.driver.steps.popleft()
        result = self.driver.device.body(step, unmasked=lambda row: row % 2 == 0)
        self.driver.tails.append(step)
        self.driver.mail(result, EXECUTOR)

    @precondition(lambda self: self.driver.tails)
    @rule()
    def tail(self) -> None:
        self.driver.tail()

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.steps and not self.driver.tails)
    @rule()
    def fail_a_step(self) -> None:
        step = self.driver.steps.popleft()
        result = self.driver.device.body(step)
        self.driver.mail(replace(result, status=StepStatus.ERROR, error="fault"), EXECUTOR)

    @rule(late=st.booleans())
    def lose_the_executor(self, late: bool) -> None:
        self.driver.lose_executor()
        if late:
            self.driver.tick()
        self.driver.load()

    @precondition(lambda self: self.waited_s < 40)
    @rule(seconds=st.integers(1, 11))
    def wait(self, seconds: int) -> None:
        self.waited_s += seconds
        self.driver.tick(seconds=seconds)
        self._replace_hung()

    def _replace_hung(self) -> None:
        """An executor that was taken for dead is told to end; its supervisor starts another."""
        if self.driver.core.engine is None:
            self.driver.lose_executor()
            self.driver.load()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        if self.driver.lost:
            self.driver.regain_tokenizer()
        self.driver.mail(Resume(), "operator")
        self._let_all_end()
        audit(self.driver.core)
        self.driver.assert_clean()
        self._count()

    def _let_all_end(self) -> None:
        """Clients take everything. What runs out here is checked by oracle and shadow KV; after
        every event the invariants were checked before, and they are once more at the end."""
        self.driver.audits = False
        for _ in range(40):
            self.driver.run()
            waiting = [r for r in self.driver.requests.values() if not r.terminals]
            if not waiting:
                return
            for request in waiting:
                self.driver.ack(request)

    def _count(self) -> None:
        driver, counts = self.driver, Counter[str](cases=1)
        counts["preemptions"] = driver.core.stats().preemptions
        counts["external writes behind a fence"] = driver.writer.fenced_hits
        counts["rejected drafts"] = driver.device.rejected_drafts
        counts["attaches"] = self.attaches
        self.reached.update({(self.depth, name): count for name, count in counts.items()})


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
