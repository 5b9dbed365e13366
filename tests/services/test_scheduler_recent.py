"""What the scheduler keeps of the last requests and steps: by number, in fixed memory."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.recent import Recent


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 9))
def test_the_last_numbers_have_their_values_and_nobody_has_anothers(
    numbers: list[int], size: int
) -> None:
    kept, told = Recent(size, 2), dict[int, bytes]()
    for at, number in enumerate(sorted(numbers)):
        told[number] = at.to_bytes(2, "little")
        kept.put(number, told[number])
    newest = max(numbers, default=0)
    for number in range(61):
        assert kept.get(number) in (None, told.get(number))
        if number in told and number > newest - size:
            assert kept.get(number) == told[number]


def test_a_value_of_another_length_is_left_out() -> None:
    kept = Recent(4, 16)
    kept.put(1, bytes(16))
    kept.put(2, b"short")
    assert kept.get(1) == bytes(16)
    assert kept.get(2) is None
    assert kept.get(0) is None
