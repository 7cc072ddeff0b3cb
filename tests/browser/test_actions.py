"""What Sample, Let through, Pause and Stop do to the queue, against a ComfyUI of a few lines that is slow at will."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route

WEB = Path(__file__).resolve().parents[2] / "web"
SERVER = """
const calls = globalThis.calls = [], queue = globalThis.queue = { running: [], pending: [] }
globalThis.trained = {}, globalThis.ending = '', globalThis.stored = null, globalThis.slow = 0
let number = 100
const add = ({ prompt, front, number: at, extra_data, partial_execution_targets: outputs }) => {
  number += 1
  const place = at ?? (front ? -number : number), id = `id${number}`
  queue.pending.push([place, id, prompt, extra_data, outputs ?? Object.keys(prompt)])
  queue.pending.sort(([a], [b]) => a - b)
  return { prompt_id: id, number: place }
}
const answer = async (path, body) => {
  if (path === '/queue' && body?.delete) {
    queue.pending = queue.pending.filter(([, id]) => !body.delete.includes(id))
    return {}
  }
  if (path === '/queue') return { queue_running: [...queue.running], queue_pending: [...queue.pending] }
  if (path === '/prompt') return add(body)
  if (path === '/flux_fft/trained') return { prompts: trained, ending }
  if (path.endsWith('/graph')) return stored
  if (path.endsWith('/details')) {
    await new Promise((resolve) => setTimeout(resolve, slow))
    return { previews: {} }
  }
  const [, id] = path.match(/prompts\\/(.*)\\/end/) ?? []
  if (id) queue.running = queue.running.filter((one) => one[1] !== id)
  if (path.endsWith('/stop')) queue.running = []
  return {}
}
export const api = new EventTarget()
api.fetchApi = async (path, { body } = {}) => {
  if (!/queue$|trained$|details$|graph$|runs\\/[^/]*$/.test(path)) calls.push(path)
  const said = await answer(path, body && JSON.parse(body))
  return { ok: !path.endsWith('/d'), json: async () => said } // of the run itself nothing is known
}
"""


def train(run: str, *steps: Any, **start: Any) -> dict[str, Any]:
    """A prompt: Start, and a Train Steps node for each number of steps."""
    first = {"class_type": "FluxFFTStart", "inputs": {"run_name": run, **start}}
    nodes = {str(i): {"class_type": "FluxFFTTrainSteps", "inputs": {"run": [str(i - 1), 0], "steps": n}}
             for i, n in enumerate(steps, 1)}
    return {"0": first, **nodes}


@pytest.fixture
def comfyui(browser: Browser) -> Iterator[Callable[..., Any]]:
    """Evaluate JavaScript where ``does`` has the actions, and ``stored`` is the graph that trained a run last."""
    page = browser.new_page()

    def serve(route: Route) -> None:
        path = route.request.url.split("test/", 1)[1]
        if path.startswith("scripts/"):
            body = SERVER if path == "scripts/api.js" else "export const app = { extensionManager: null }"
        else:
            body = (WEB / path.removeprefix("extensions/pack/")).read_text(encoding="utf-8") if path else ""
        route.fulfill(body=body, content_type="text/javascript" if path else "text/html")

    page.route("http://test/**", serve)
    page.goto("http://test/")
    page.evaluate("import('/extensions/pack/actions.mjs').then((does) => { globalThis.does = does })")
    page.evaluate("import('/extensions/pack/store.mjs').then(({ runs }) => { globalThis.runs = runs })")

    def evaluate(script: str, *given: Any) -> Any:
        return page.evaluate(f"async (given) => {{ {script} }}", list(given))

    evaluate("stored = given[0]", {"prompt": train("d", 500), "workflow": None})
    yield evaluate
    page.close()


KNOWN = "runs.wish('d', '').status = { state: given[0], step: given[1], resume_step: given[1] };"
RUNNING = "queue.running = [[1, 'user', given[2], {}, Object.keys(given[2])]];"
QUEUE = ("return queue.pending.map(([, , prompt]) => Object.values(prompt)"
         ".filter((node) => node.class_type.endsWith('Steps')).map((node) => node.inputs.steps))")


def test_what_is_about_to_train_is_queued_again_as_it_is(comfyui: Callable[..., Any]) -> None:
    """Not the graph that trained the run last: the user has just changed it."""
    queued = comfyui(f"{KNOWN} {RUNNING} await does.sampleNow('d', 'a star'); {QUEUE}", "paused", 300, train("d", 800))
    assert queued == [[], [800]] and comfyui("return calls").count("/flux_fft/prompts/user/end") == 1


@pytest.mark.parametrize(("state", "step", "prompt", "ends"), [
    ("paused", 300, train("d", 500), True),
    ("finished", 500, train("d", 500, 300), True),  # it is given more steps
    ("finished", 500, train("d", 200, 300), False),  # what runs is behind Train Steps
    ("finished", 500, train("d", ["9", 0]), True),
    ("stopped", 300, train("e", 500), False),
    ("stopped", 300, train("d", 500, if_different="use the next free name"), False),
    ("paused", 300, train(["9", 0], 500), False),  # type: ignore[arg-type]
])
def test_only_a_prompt_that_is_going_to_train_the_run_makes_way(comfyui: Callable[..., Any], state: str, step: int,
                                                                prompt: dict[str, Any], ends: bool) -> None:
    comfyui(f"{KNOWN} {RUNNING} await does.sampleNow('d', 'a star')", state, step, prompt)
    assert comfyui("return calls.includes('/flux_fft/prompts/user/end')") == ends
    assert len(comfyui(QUEUE)) == (2 if ends else 1)


def test_the_prompt_that_trains_it_is_known_whatever_its_graph_says(comfyui: Callable[..., Any]) -> None:
    given = ("training", 3, train(["9", 0], 500))  # type: ignore[arg-type]
    comfyui(f"{KNOWN} {RUNNING} trained = {{ d: 'user' }}; await does.sampleNow('d', 'a star')", *given)
    assert comfyui("return calls.includes('/flux_fft/prompts/user/end')")
    comfyui(f"calls.length = 0; {KNOWN} {RUNNING} trained = {{ d_2: 'user' }}; await does.halt('d', 'stop')",
            "stopped", 3, train("d", 500))
    assert not comfyui("return calls.includes('/flux_fft/prompts/user/end')"), "it trains d_2"


def test_a_part_of_the_graph_without_its_training_is_left_alone(comfyui: Callable[..., Any]) -> None:
    comfyui(f"{KNOWN} queue.running = [[1, 'user', given[2], {{}}, ['0']]]; await does.sampleNow('d', 'a star')",
            "paused", 300, train("d", 500))
    assert comfyui(QUEUE) == [[]] and not comfyui("return calls.includes('/flux_fft/prompts/user/end')")


def test_what_is_behind_its_training_is_not_stopped_with_it(comfyui: Callable[..., Any]) -> None:
    """A prompt that had the run go on may train another one by now."""
    comfyui(f"{KNOWN} queue.running = [[1, 'user', given[2], {{ flux_fft_resumes: 'd' }}, ['1']]];"
            " trained = { e: 'user' }; await does.halt('d', 'stop')", "finished", 500, train("d", 500))
    assert not comfyui("return calls.includes('/flux_fft/prompts/user/end')")


def test_a_part_of_a_graph_is_queued_again_as_that_part_and_lists_as_values(comfyui: Callable[..., Any]) -> None:
    prompt = train("d", 500, 300)
    prompt["1"]["inputs"] |= {"three": ["a", "b", "c"], "two": ["x", 1]}
    found = comfyui(f"""{KNOWN} trained = {{ d: 'user' }}; queue.running = [[1, 'user', given[2], {{}}, ['1']]]
        await does.sampleNow('d', 'a star'); const [, , nodes, , outputs] = queue.pending[1]
        return [outputs, nodes.resumed_1.inputs]""", "training", 300, prompt)
    assert found == [["resumed_1"], {"run": ["resumed_0", 0], "steps": 500, "three": {"__value__": ["a", "b", "c"]},
                                     "two": {"__value__": ["x", 1]}}]


def test_a_picture_asked_for_while_the_run_is_being_ended_does_not_have_it_go_on(comfyui: Callable[..., Any]) -> None:
    queued = comfyui(f"{KNOWN} {RUNNING} trained = {{ d: 'user' }}; ending = 'user';"
                     f"await does.sampleNow('d', 'a star'); {QUEUE}", "training", 3, train("d", 500))
    assert queued == [[]] and comfyui("return calls") == ["/prompt"]


def test_resume_pressed_twice_queues_once(comfyui: Callable[..., Any]) -> None:
    comfyui(f"{KNOWN} await does.resume('d'); queue.running = queue.pending.splice(0)", "paused", 3)
    comfyui("await does.resume('d')")
    assert comfyui(QUEUE) == []


def test_a_picture_that_is_refused_leaves_nothing_behind(comfyui: Callable[..., Any]) -> None:
    queued = comfyui(f"""{KNOWN} {RUNNING} trained = {{ d: 'user' }}
        const {{ api }} = await import('/scripts/api.js'), fetch = api.fetchApi
        const refused = {{ ok: false, json: async () => ({{ error: {{ message: 'no such sampler' }} }}) }}
        api.fetchApi = async (path, ...more) => (path === '/prompt' && more[0].body.includes('FluxFFTPreview')
          ? refused : fetch(path, ...more))
        await does.sampleNow('d', 'a star'); {QUEUE}""", "training", 3, train("d", 500))
    assert queued == [] and "no such sampler" in comfyui("return runs.get('d').requestFailed")
    assert not comfyui("return calls.includes('/flux_fft/prompts/user/end')")


def test_what_was_to_go_on_and_has_begun_is_followed_by_another(comfyui: Callable[..., Any]) -> None:
    """It has left the queue between two looks."""
    queued = comfyui(f"""{KNOWN} {RUNNING}
        queue.pending = [[2, 'next', given[2], {{ flux_fft_resumes: 'd' }}, ['1']]]
        const push = queue.pending.push
        queue.pending.push = (...one) => {{ // as the picture is queued
          queue.running = [queue.pending.shift()]
          queue.pending.push = push
          return queue.pending.push(...one)
        }}
        await does.sampleNow('d', 'a star'); {QUEUE}""", "training", 3, train("d", 500))
    assert queued == [[], [500]]
    assert comfyui("return calls.filter((call) => call.endsWith('/end'))") == ["/flux_fft/prompts/next/end"]


def test_stop_pressed_while_a_picture_is_prepared_takes_it_out(comfyui: Callable[..., Any]) -> None:
    queued = comfyui(f"""{KNOWN} {RUNNING} slow = 300
        await Promise.all([does.sampleNow('d', 'a star'), does.halt('d', 'stop')]); {QUEUE}""",
                     "training", 3, train("d", 500))
    assert queued == [] and comfyui("return calls.at(-1)") == "/flux_fft/runs/d/stop"


def test_let_through_that_is_refused_leaves_what_waits(comfyui: Callable[..., Any]) -> None:
    queued = comfyui(f"""{KNOWN} {RUNNING}
        queue.pending = [[2, 'next', given[2], {{ flux_fft_resumes: 'd' }}, ['1']], [3, 'other', {{}}, {{}}, []]]
        const {{ api }} = await import('/scripts/api.js'), fetch = api.fetchApi
        const refused = {{ ok: false, json: async () => ({{ error: {{ message: 'no such file' }} }}) }}
        api.fetchApi = async (path, ...more) => (path === '/prompt' ? refused : fetch(path, ...more))
        await does.letThrough('d'); {QUEUE}""", "training", 3, train("d", 500))
    assert queued == [[500], []] and "no such file" in comfyui("return runs.get('d').requestFailed")
