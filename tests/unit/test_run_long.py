"""Long runs: what their events say costs little, and is what a list of all of them says."""

import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.events import EventLog
from trainer.history import History, Steps


def lines(count, seed=0):
    """Events of a run of so many steps, as their lines: usual ones, odd ones, and what is none."""
    pick, n, step = random.Random(seed), 0, 0
    found = []
    while step < count:
        n, step = n + 1, step + 1
        event = {"n": n, "t": round(1.7e9 + n * 1.2345, 3), "type": "step", "step": step, "loss": pick.random(),
                 "lr": 3.5e-6, "seconds": pick.random() * 3, "images": 5 * step, "epoch": round(step / 7, 6)}
        odd = pick.randrange(400)
        if odd == 0:
            event["loss"] = None
        elif odd == 1:
            event["not_finite"] = ["double_blocks.3"]
        elif odd == 2:
            del event["images"], event["epoch"]
        elif odd == 3:
            event["lr"] = 0
        elif odd in (4, 5, 6, 7):
            back = max(0, step - pick.randrange(30))
            kind = ("saved", "resumed", "rolled_back", "memory")[odd - 4]
            event = {"n": n, "t": 1.5, "type": kind, "step": back, "seconds": 1.0, "fresh": False}
            step = back if odd in (5, 6) else step - 1
        found.append(json.dumps(event).encode())
        if odd == 8:
            found.append(pick.choice((b"\0" * 30, b'{"n": 3, "type"', b"[]", b"7", b'{"t": 1], [2}', b"\xff\xfe")))
    return found


def plain(found):
    """The events one by one, and the steps that are of the present, in a plain list."""
    events, steps = [], []
    for line in found:
        try:
            event = json.loads(line)
            assert event["n"] and event["type"]
        except (ValueError, TypeError, KeyError):
            continue
        events.append(event)
        if event["type"] == "step":
            steps.append(event)
        elif event["type"] in ("resumed", "rolled_back"):
            steps = [e for e in steps if e["step"] <= event["step"]]
    return events, steps


@pytest.mark.parametrize("count, seed", [(0, 0), (50, 1), (20_000, 2), (3_000, 3)])
def test_a_long_history_says_what_its_lines_say(tmp_path, count, seed):
    path = tmp_path / "events.jsonl"
    found = lines(count, seed)
    path.write_bytes(b"".join(line + b"\n" for line in found) + b'{"n": 99999, "type": "st')
    events, steps = plain(found)
    log = EventLog(path)
    assert log.events() == events
    history = log.history()
    assert list(history.steps) == steps and len(history.steps) == len(steps)
    assert [list(e) for e in history.steps] == [list(e) for e in steps], "in the same order"
    for name in ("n", "step", "loss", "lr", "seconds", "images", "epoch"):
        assert history.steps.column(name) == [e.get(name) for e in steps]
    other = History()
    for event in events:
        other.apply(event)
    assert history.summary() == other.summary()
    pick = random.Random(seed)
    for _ in range(20):
        since, limit = pick.randrange(-1, count + 5), pick.choice([None, 0, 1, 7, 2000])
        assert log.events(since, limit) == [e for e in events if e["n"] > since][:limit]
    for kinds in (("saved",), ("resumed", "memory"), ("never",), ("step",)):
        assert log.events_of(*kinds) == [e for e in events if e["type"] in kinds]
    log.append("step", step=7, loss=1.0, lr=1.0, seconds=2.0, images=1, epoch=1.0)
    assert log.events(limit=None)[-1] == EventLog(path).events()[-1] == dict(log.history().steps[-1])


STEPS = st.lists(st.one_of(
    st.fixed_dictionaries({
        "n": st.integers(0, 2**60), "t": st.floats(allow_nan=False), "type": st.just("step"),
        "step": st.integers(-5, 2**60), "loss": st.one_of(st.none(), st.floats(allow_nan=False), st.integers(0, 3)),
        "lr": st.floats(allow_nan=False), "seconds": st.one_of(st.none(), st.floats(allow_nan=False)),
        "images": st.one_of(st.integers(0, 2**60), st.booleans()), "epoch": st.floats(allow_nan=False)}),
    st.fixed_dictionaries({"n": st.just(1), "type": st.just("step"), "step": st.integers(0, 9)}),
), max_size=12)  # fmt: skip


@given(events=STEPS, step=st.integers(-6, 12), place=st.integers(-14, 14), start=st.integers(-14, 14))
@settings(max_examples=200, deadline=None)
def test_steps_are_as_a_list_of_them(events, step, place, start):
    steps = Steps()
    for event in events:
        steps.append(event)

    def exact(found):
        return json.dumps(found)  # tells 1 from 1.0 and true, and the order of the fields

    assert exact(list(steps)) == exact(events) and exact(steps[start:place]) == exact(events[start:place])
    if -len(events) <= place < len(events):
        assert exact(steps[place]) == exact(events[place])
    else:
        with pytest.raises(IndexError):
            steps[place]
    assert exact(list(steps.until(step))) == exact([e for e in events if e["step"] <= step])


def test_an_event_of_a_long_run_takes_about_a_hundred_bytes_of_memory(tmp_path):
    path = tmp_path / "events.jsonl"
    usual = '{{"n": {n}, "t": 1.5, "type": "step", "step": {n}, "loss": 0.25, "lr": 3.5e-06, "seconds": 1.25,' \
            ' "images": {n}, "epoch": 0.5}}\n{{"n": {m}, "t": 1.5, "type": "memory", "vram_gb": 1.5, "ram_gb": 2.5}}\n'
    path.write_text("".join(usual.format(n=n, m=n + 1) for n in range(1, 40_001, 2)))
    log = EventLog(path)
    log.history()  # code and caches
    log = EventLog(path)
    tracemalloc.start()
    assert log.history().step == 39_999
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / 40_000 < 120 and most < held + 8_000_000
