"""Tenants share the queue fairly, and one tenant alone is served in the order of arrival."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepmesh.wire.messages import FlushCache
from services.scheduler.core.policy import FairShare
from tests.core.driver import CONFIG, Driver, words

A, B = b"a", b"b"


def served(shares: FairShare, waiting: list[tuple[int, int, bytes]]) -> list[bytes]:
    """Admit all, first place first; whose request each was."""
    order = sorted(waiting)
    for place, _, _ in order:
        shares.admitted(place)
    return [tenant for _, _, tenant in order]


def test_a_flood_of_one_tenant_does_not_delay_the_first_of_another() -> None:
    shares = FairShare()
    waiting = [(shares.place(A, 100), n, A) for n in range(1000)]
    for place, _, _ in waiting[:300]:
        shares.admitted(place)
    waiting = [*waiting[300:], (shares.place(B, 100), 1000, B)]
    assert B in served(shares, waiting)[:2]


def test_two_tenants_take_turns_by_tokens() -> None:
    shares = FairShare()
    waiting = [(shares.place(A, 300), n, A) for n in range(10)]
    waiting += [(shares.place(B, 100), 100 + n, B) for n in range(30)]
    order = served(shares, waiting)
    tokens = {A: 0, B: 0}
    for tenant in order[:28]:
        tokens[tenant] += 300 if tenant == A else 100
        assert abs(tokens[A] - tokens[B]) <= 400
    assert len(order) == 40


def test_who_asked_for_nothing_saves_nothing_up() -> None:
    shares = FairShare()
    for _ in range(50):
        shares.admitted(shares.place(A, 100))
    waiting = [(shares.place(B, 100), n, B) for n in range(50)]
    waiting += [(shares.place(A, 100), 50 + n, A) for n in range(50)]
    order = served(shares, waiting)
    assert order[:20].count(A) >= 9


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=40))
def test_one_tenant_is_served_in_the_order_of_arrival(events: list[tuple[int, bool]]) -> None:
    shares, places = FairShare(), list[int]()
    admitted = 0
    for tokens, admits in events:
        places.append(shares.place(A, tokens))
        if admits:
            shares.admitted(places[admitted])
            admitted += 1
    assert places == sorted(set(places))


@given(st.lists(st.tuples(st.sampled_from([A, B, b"c"]), st.integers(1, 500)), min_size=1))
def test_nobody_waits_behind_more_than_his_share(asks: list[tuple[bytes, int]]) -> None:
    """With k tenants, what comes before a request is at most k times what its tenant asked for up
    to it, and one request of each other."""
    shares = FairShare()
    waiting = [(shares.place(tenant, n), i, tenant, n) for i, (tenant, n) in enumerate(asks)]
    order = sorted(waiting)
    before = {tenant: 0 for tenant, _ in asks}
    for _, _, tenant, tokens in order:
        before[tenant] += tokens
        for other, got in before.items():
            assert other == tenant or got <= before[tenant] + 500


# ---------------------------------------------------------------- in the scheduler

ONE_ROW = replace(CONFIG, max_rows=1)


def ends(driver: Driver) -> list[bytes]:
    """Requests in the order in which they ended."""
    return [report.rid for report in driver.ended()]


def test_the_queue_serves_tenants_in_turn() -> None:
    driver = Driver(ONE_ROW)
    flood = [driver.ask(20, max_tokens=4, tenant=A) for _ in range(8)]
    driver.tick()  # the first of them enters
    others = [driver.ask(20, max_tokens=4, tenant=B) for _ in range(2)]
    driver.run()
    order = ends(driver)
    assert [order.index(request.rid) for request in flood] == sorted(
        order.index(request.rid) for request in flood
    )
    assert order.index(others[0].rid) <= 2
    assert order.index(others[1].rid) <= 4
    driver.assert_clean()


def test_priority_goes_before_shares() -> None:
    driver = Driver(ONE_ROW)
    driver.ask(20, max_tokens=4, tenant=A)
    driver.tick()
    waiting = [driver.ask(20, max_tokens=4, tenant=B)]
    waiting += [driver.ask(20, max_tokens=4, tenant=A, priority=1) for _ in range(2)]
    driver.run()
    assert ends(driver)[1:] == [waiting[1].rid, waiting[2].rid, waiting[0].rid]
    driver.assert_clean()


def test_a_preempted_request_keeps_its_place() -> None:
    """Blocks for one of two: who was first stays first, whatever others ask for meanwhile."""
    driver = Driver(num_global_blocks=12, num_window_blocks=16)
    requests = [driver.ask(30, max_tokens=40, tenant=tenant) for tenant in (A, B, A, B)]
    driver.run()
    assert driver.core.stats().preemptions > 0
    assert ends(driver)[0] == requests[0].rid
    driver.assert_clean()


def test_flushed_prefixes_are_computed_again() -> None:
    driver = Driver()
    prompt = words(60)
    driver.ask(prompt, max_tokens=3)
    driver.run()
    driver.mail(FlushCache(), "tokenizer-0")
    assert driver.core.stats().cached_blocks == (0, 0, 0)
    again = driver.ask(prompt, max_tokens=3)
    driver.run()
    assert again.cached_tokens == 0
    driver.assert_clean()


def test_a_flush_takes_nothing_from_who_runs() -> None:
    driver = Driver()
    prompt = words(60)
    first = driver.ask(prompt, max_tokens=30)
    for _ in range(6):
        driver.step()
    driver.ask(prompt, max_tokens=30)
    for _ in range(3):
        driver.step()
        driver.mail(FlushCache(), "tokenizer-0")
    driver.run()
    assert first.terminals
    driver.assert_clean()


def test_without_an_engine_there_is_nothing_to_flush() -> None:
    Driver(load=False).mail(FlushCache(), "tokenizer-0")
