"""Run directories, with an engine and without; workers, in this process where only messages count, and as real
processes where the end of one matters."""

import threading

import pytest
from runs import empty_run, held_open
from states import engine
from workers import make, wait_for

from trainer.client import open_run
from trainer.run import RunDirectory


@pytest.fixture
def folder(tmp_path):
    """Where a run may be made."""
    return tmp_path / "run"


@pytest.fixture
def run(folder):
    """A run that no engine has seen."""
    return empty_run(folder)


@pytest.fixture
def holder(run):
    """Another process that has the run open, as a worker would."""
    with held_open(run) as process:
        yield process


@pytest.fixture
def trained(tiny):
    """A run of two steps at a rate that moves every weight, in memory and in a save point: its directory and engine."""
    run = make(tiny, optimizer={"lr": 3e-3, "weight_precision": "split"})
    trainer = engine(run)
    for _ in range(2):
        trainer.train_step()
    run.write_save_point(2, trainer.save)
    return run, trainer


@pytest.fixture
def serve():
    """Workers in threads of this process, with clients that talk to them over the real connection."""
    from trainer.worker import Worker

    workers, threads, clients = [], [], []

    def start(run: RunDirectory, kind: type[Worker] = Worker, **options):
        worker = kind(run, **options)
        thread = threading.Thread(target=worker.serve)
        thread.start()
        workers.append(worker), threads.append(thread)
        wait_for(lambda: run.worker_alive() or not thread.is_alive())
        client = open_run(run.path, launch=False)
        clients.append(client)
        return worker, client

    yield start
    for client in clients:
        client.close()
    for worker in workers:
        worker.quit("the test is over")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def launched():
    """Clients of workers in real processes; what still runs at the end is killed."""
    clients = []

    def start(run: RunDirectory, **options):
        client = open_run(run.path, **options)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()
        if client._child is not None and client._child.poll() is None:
            client._child._process.kill()
            client._child.wait(120)
