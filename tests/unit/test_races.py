"""What happens between two moments: requests that cross, saves that take long, connections that break."""

import threading
import time

import pytest
from workers import SLOW, make, wait_for, wait_for_state

from trainer import protocol
from trainer.client import WorkerClosing, WorkerError, open_run
from trainer.worker import Worker


class Gate:
    """Holds the worker's thread at its next save until it is opened."""

    def __init__(self, worker: Worker, error: Exception | None = None):
        self.reached, self.open = threading.Event(), threading.Event()
        session = worker._session
        save = session.save

        def held():
            self.reached.set()
            assert self.open.wait(120)
            session.save = save
            if error is not None:
                raise error
            return save()

        session.save = held


def in_background(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def gate():
    gates = []

    def make_gate(*args):
        gates.append(Gate(*args))
        return gates[-1]

    yield make_gate
    for one in gates:
        one.open.set()


# -- pausing


def between(worker: Worker, deed) -> None:
    """Have ``deed`` done after the next step, at the moment before the worker looks at its goal."""
    session = worker._session
    step = session.step

    def stepped():
        reached = step()
        session.step = step
        deed()
        return reached

    session.step = stepped


@pytest.mark.parametrize("reads", range(6))
def test_a_pause_between_any_two_looks_at_the_goal_pauses(tiny, reads):
    """Another thread takes the goal away after so many of the reads that follow a step."""
    run = make(tiny)

    class Watched(Worker):
        left = None

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name in ("_goal", "_pauses") and self.left is not None:
                if self.left == 0:
                    self.left = None
                    # From another thread, as a client's request: the lock, where it is held, keeps it waiting.
                    thread = threading.Thread(target=lambda: self.pause(wait=False), daemon=True)
                    thread.start()
                    thread.join(0.2)
                else:
                    self.left -= 1
            return value

    worker = Watched(run)
    worker.left = None
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        wait_for(lambda: worker._session.state == "paused")
        between(worker, lambda: setattr(worker, "left", reads))
        worker.train(1)  # reached by that very step
        wait_for(lambda: worker._session.state in ("paused", "failed", "finished"))
        time.sleep(0.1)
        status = run.status()
        assert status["error"] is None and status["state"] in ("paused", "finished")
        # Finished is a promise: its goal was there to be reached when that was said, and it is saved.
        assert status["save_point_step"] == 1 or status["state"] == "paused"
    finally:
        worker.quit("the test is over")
        thread.join(120)


def test_a_pause_just_before_the_target_is_reached_is_a_pause(tiny, serve):
    run = make(tiny)
    worker, client = serve(run)
    wait_for_state(client, "paused")
    between(worker, lambda: worker.pause(wait=False))
    client.train(1)
    wait_for(lambda: client.status()["step"] == 1 and client.status()["state"] != "training")
    assert client.status()["state"] == "paused" and run.save_points() == []
    client.train(1)
    assert wait_for_state(client, "finished")["step"] == 1


def test_a_pause_just_before_the_pause_on_the_way_is_the_users(tiny, serve):
    run = make(tiny)
    worker, client = serve(run)
    pause = worker._pause_on_the_way

    def late(due, step):
        worker.pause(wait=False)
        pause(due, step)

    worker._pause_on_the_way = late
    client.train(2, pause_at=1)
    wait_for(lambda: client.status()["step"] == 1 and client.status()["state"] == "paused")
    assert client.status()["on_the_way"] is None
    worker._pause_on_the_way = pause
    client.train(2)
    assert wait_for_state(client, "finished")["step"] == 2


# -- closing


def test_training_asked_for_during_the_save_of_a_stop_goes_on_in_the_next_worker(tiny, launched, serve, gate):
    run = make(tiny)
    worker, client = serve(run)
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    held = gate(worker)
    stopping = in_background(client.stop)
    assert held.reached.wait(120)
    with pytest.raises(WorkerClosing):
        client.train(4)  # may launch none
    said = []
    other = in_background(lambda: launched(run, say=said.append).train(4))
    time.sleep(0.5)
    assert other.is_alive() and said == ["the worker of run 'run' is saving: waiting for it to end"]
    held.open.set()
    stopping.join(120), other.join(120)
    assert not other.is_alive()
    wait_for(lambda: run.status()["state"] == "finished", 60)
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4]


def test_a_client_that_waits_for_the_save_of_a_stop_goes_on_when_that_fails(tiny, serve, gate):
    run = make(tiny)
    worker, client = serve(run)
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    owner = open_run(run.path, owner=True)
    held = gate(worker, ValueError("the disk is full"))
    errors = []

    def stop():
        try:
            client.stop()
        except ValueError as error:
            errors.append(str(error))

    stopping = in_background(stop)
    assert held.reached.wait(120)
    training = in_background(lambda: owner.train(4))
    time.sleep(0.3)
    assert training.is_alive()
    held.open.set()
    stopping.join(120), training.join(120)
    assert errors == ["the disk is full"] and not training.is_alive()
    assert wait_for_state(owner, "finished")["step"] == 4 and not worker.quitting
    owner.close()


def test_training_asked_for_during_the_last_save_of_an_idle_worker_is_not_lost(tiny, serve, gate):
    run = make(tiny)
    worker, client = serve(run, idle_park=0.2, idle_exit=1.0)
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    held = gate(worker)
    assert held.reached.wait(120)
    with pytest.raises(WorkerClosing):
        client.train(3)
    held.open.set()
    wait_for(lambda: not run.locked())
    assert run.status()["save_point_step"] == 2


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("open_first", [True, False])
def test_waiting_for_a_worker_that_saves_can_be_cancelled(tiny, serve, gate, open_first):
    run = make(tiny)
    worker, client = serve(run)
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    cancel = threading.Event()

    def check():
        if cancel.is_set():
            raise Cancelled

    waiting = open_run(run.path, check=check) if open_first else None
    held = gate(worker)
    stopping = in_background(client.stop)
    assert held.reached.wait(120)
    threading.Timer(0.3, cancel.set).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        (waiting or open_run(run.path, check=check)).train(4)
    assert 0.2 < time.monotonic() - started < 3
    held.open.set()
    stopping.join(120)
    assert run.status()["state"] == "stopped" and run.status()["save_point_step"] == 2
    if waiting is not None:
        waiting.close()


# -- connections


def test_a_broken_connection_ends_no_worker_and_loses_no_request(tiny, serve):
    run = make(tiny, **SLOW)
    worker, _ = serve(run)
    owner = open_run(run.path, launch=False, owner=True)
    owner.train(10_000)
    wait_for(lambda: owner.status()["step"] >= 1)
    owner._free[0].close()  # as if the system had cut it
    owner.pause()
    assert owner.status()["state"] == "paused" and not worker.quitting and run.save_points() == []
    owner.train(run.status()["step"] + 1)
    wait_for_state(owner, "finished")
    assert worker._session.run.status()["worker"] == "alive"
    owner._owner_connection.close()  # it is the owner still: its end is the worker's
    wait_for(lambda: not run.locked(), 120)


def test_a_request_that_breaks_every_connection_is_told_and_the_worker_lives_on(tiny, serve, monkeypatch):
    run = make(tiny)
    worker, client = serve(run)
    wait_for_state(client, "paused")
    monkeypatch.setattr(protocol, "encode", lambda *_: (_ for _ in ()).throw(OSError("too long")))
    with pytest.raises(WorkerError, match="hangs up on every 'save'.*too long"):
        client.save()
    monkeypatch.undo()
    assert client.status()["state"] == "paused" and not worker.quitting
