"""What the levers decide, asked from Python; the rules themselves are tested in the core."""

from leap_rs._leap import Evictor


def test_an_evictor_takes_the_worst_that_make_room_and_rests() -> None:
    evictor = Evictor(2.0, 0.5)
    residents = [(5.0, 3, 4), (9.0, 2, 4), (5.0, 7, 1), (2.0, 9, 4)]
    found = evictor.victims(residents, key=1.0, blocks=8, seat=False, free_blocks=3, now_s=10.0)
    # Of equal keys the last to arrive: 3 + 4 + 1 blocks are enough.
    assert found == [1, 2]
    assert evictor.evicted == 2
    assert (evictor.ready(13.9), evictor.ready(14.0)) == (False, True)
    assert evictor.victims(residents, key=1.0, blocks=0, seat=True, free_blocks=99, now_s=14.0) == [1]
