"""The latest items of one thread, for another one."""

import threading

from tests.patience import PATIENCE
from trtforge.core.recent import Recent


def test_items_are_taken_once_in_their_order_and_the_oldest_are_dropped() -> None:
    recent: Recent[int] = Recent(3)
    assert recent.take(0) == []
    for item in range(5):
        recent.add(item)
    assert recent.take(None) == [2, 3, 4]
    assert recent.take(0) == []


def test_the_newest_item_may_be_changed_until_it_is_taken() -> None:
    recent: Recent[list[int]] = Recent(3)

    def change(item: list[int]) -> bool:
        item.append(1)
        return True

    assert not recent.change_newest(change)
    recent.add([0])
    assert recent.change_newest(change)
    assert not recent.change_newest(lambda item: False)
    assert recent.take(0) == [[0, 1]]
    assert not recent.change_newest(change)


def test_who_waits_gets_what_comes_and_nothing_after_the_end() -> None:
    recent: Recent[str] = Recent(3)
    taken: list[list[str]] = []
    waiter = threading.Thread(target=lambda: taken.extend(recent.take(None) for _ in range(2)))
    waiter.start()
    recent.add("a")
    while waiter.is_alive() and not taken:
        waiter.join(0.01)
    recent.close()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()
    assert taken == [["a"], []]
    recent.close()
    recent.add("b")
    assert recent.take(None) == ["b"]
