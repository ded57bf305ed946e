"""An engine of vLLM in a process of its own, driven step by step: what the vLLM benches and the live tests share.

`python vllm_engine.py` opens engines and runs requests as lines of JSON on its standard input say; `Engine` is the other
end. Time is the engine's own: it stands still between two calls of `steps`, so that engines that take turns are compared
under the same noise of the machine, and counts from the first call after `begin`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm_process import Process, serve

DEFAULTS = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "block_size": 32}
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Threads that wait for each other after every operator are up to 20 times slower where something else runs, too.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
LEAP = "leap_rs.vllm.LeapScheduler"


class Engine(Process):
    """A process with one engine at a time. Leaving the `with` shuts it down as vLLM does; `kill` does not.

    Args:
        environment: Its variables instead of this process's own.
        script: One that serves more than an `EngineServer` does.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, script: str | Path = __file__) -> None:
        variables = {**VARIABLES, **(os.environ if environment is None else environment)}
        # In one process with its front end a step of vLLM is a step here. Metrics lie in TMPDIR, under the parent's number.
        super().__init__(script, {**variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

    def open(self, model: str | Path, *, leap: Mapping[str, Any] | None, **options: Any) -> None:
        """Opens an engine with the plugin's options `leap`; None is stock vLLM, without the plugin's scheduler."""
        plugin = {} if leap is None else {"scheduler_cls": LEAP, "additional_config": {"leap": dict(leap)}}
        self.ask("open", options={**DEFAULTS, "model": str(model), **plugin, **options})

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of user messages in the model's chat template."""
        made: list[list[int]] = self.ask("tokens", texts=list(texts))
        return made

    def begin(self, requests: Sequence[Mapping[str, Any]], flying: int | None = None) -> None:
        """Sets requests (`tokens`, `sampling` and, for a LoRA adapter, the path `adapter`) up, all at once or so that `flying`
        are under way; the clock starts at 0."""
        self.ask("begin", requests=list(requests), flying=flying or len(requests))

    def steps(self, most: int) -> dict[str, Any]:
        """Runs at most so many steps; returns those that `finished` in them, and whether all have."""
        answer: dict[str, Any] = self.ask("steps", most=most)
        return answer

    def report(self) -> dict[str, Any]:
        """Since `begin`: steps, their seconds, CPU seconds of the process and of its thread while in the scheduler; requests
        that lost their KV cache, and the tokens that they computed again."""
        answer: dict[str, Any] = self.ask("report")
        return answer

    def run(self, requests: Sequence[Mapping[str, Any]], flying: int | None = None) -> list[dict[str, Any]]:
        """Runs requests to their end; returns them in the order given."""
        self.begin(requests, flying)
        finished: list[dict[str, Any]] = []
        while not (part := self.steps(64))["done"]:
            finished += part["finished"]
        return sorted(finished + part["finished"], key=lambda request: request["number"])

    def metrics(self) -> dict[str, float]:
        """The plugin's counters and gauges as `name` or `name/label`; of histograms their sum as `name/label/sum`."""
        answer: dict[str, float] = self.ask("metrics")
        return answer

    def wait_for(self, reached: Callable[[dict[str, float]], bool], seconds: float = 60.0) -> dict[str, float]:
        """The plugin's numbers once they have got somewhere, or as they are after so many seconds: it learns in threads."""
        until = time.monotonic() + seconds
        while not reached(numbers := self.metrics()) and time.monotonic() < until:
            time.sleep(0.05)
        return numbers

    def predicted(self, tokens: Sequence[int], max_tokens: int) -> dict[str, float]:
        """What both readouts predict for a prompt, by a request that is aborted after its first step: no label."""
        sums = {name: f"predicted_tokens/{name}/sum" for name in ("prompt", "state")}
        before = self.metrics()
        self.ask("probe", tokens=list(tokens), sampling={"max_tokens": max_tokens})
        after = self.wait_for(lambda now: all(now[key] > before[key] for key in sums.values()))
        return {name: after[key] - before[key] for name, key in sums.items()}

    def shut(self) -> None:
        """Shuts the engine down; another may be opened."""
        self.ask("shut")

    def close(self) -> None:
        """Shuts down and ends the process."""
        self.shut()
        super().close()


def take_turns(engines: Sequence[Engine], steps: int = 16) -> list[list[dict[str, Any]]]:
    """Runs what each engine has been given in turns of a few steps; returns what finished, an entry an engine."""
    finished: list[list[dict[str, Any]]] = [[] for _ in engines]
    running = list(range(len(engines)))
    while running:
        for i in tuple(running):
            part = engines[i].steps(steps)
            finished[i] += part["finished"]
            if part["done"]:
                running.remove(i)
    return [sorted(part, key=lambda request: request["number"]) for part in finished]


@contextlib.contextmanager
def opened(model: str | Path, engines: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Engine]]:
    """Engines by their names, each in a process of its own, from what `Engine.open` takes."""
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(Engine()) for name in engines}
        for name, options in engines.items():
            made[name].open(model, **options)
        yield made


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and from where to where the repeats go."""
    return f"{sum(values) / len(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def random_prompts(rng: np.random.Generator, n: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of random tokens: what is measured with them does not hang on what they say."""
    return [rng.integers(1000, 20_000, size).tolist() for size in rng.integers(shortest, longest + 1, n)]


class EngineServer:
    """The process's side: one engine, and the requests that it has been given."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._scheduler_s = 0.0
        self._preemptions = self._recomputed = 0
        self._adapters: dict[str, Any] = {}

    def open(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)
        self._watch_scheduler()

    @property
    def _core(self) -> Any:
        """The engine's core; None where it lives in a process of its own."""
        return getattr(self._llm.llm_engine.engine_core, "engine_core", None)

    def _watch_scheduler(self) -> None:
        for name in ("schedule", "update_from_output"):
            setattr(self._core.scheduler, name, self._timed(getattr(self._core.scheduler, name)))
        self._count_preemptions(self._core.scheduler)

    def _count_preemptions(self, scheduler: Any) -> None:
        """By vLLM's own bookkeeping, and not by the plugin's: stock is counted too."""
        preempt, schedule = scheduler._preempt_request, scheduler.schedule
        self._away: set[str] = set()

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._away.add(request.request_id)
            self._preemptions += 1
            return preempt(request, *args, **kwargs)

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id in self._away & output.num_scheduled_tokens.keys():
                self._away.discard(request_id)
                request = scheduler.requests[request_id]
                cached = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
                self._recomputed += request.num_tokens - cached
            return output

        scheduler._preempt_request, scheduler.schedule = counted, scheduled

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._scheduler_s += time.thread_time() - began

        return timed

    def tokens(self, texts: list[str]) -> list[list[int]]:
        tokenizer = self._llm.get_tokenizer()
        messages = [[{"role": "user", "content": text}] for text in texts]
        made = [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True).input_ids for m in messages
        ]
        return [list(tokens) for tokens in made]

    def begin(self, requests: list[dict[str, Any]], flying: int) -> None:
        self._requests, self._flying = requests, flying
        self._sent = 0
        self._live: dict[str, dict[str, Any]] = {}
        self._clock = self._step_s = self._scheduler_s = 0.0
        self._cpu_began = time.process_time()
        self._steps = self._preemptions = self._recomputed = 0

    def steps(self, most: int) -> dict[str, Any]:
        finished: list[dict[str, Any]] = []
        for _ in range(most):
            began = time.perf_counter()
            while self._sent < len(self._requests) and len(self._live) < self._flying:
                self._send(began)
            if not self._live:
                break
            stepping = time.perf_counter()
            outputs = self._llm.llm_engine.step()
            ended = time.perf_counter()
            self._steps += 1
            self._step_s += ended - stepping
            self._clock += ended - began
            for output in outputs:
                self._take(output, finished)
        return {"finished": finished, "done": not self._live and self._sent == len(self._requests)}

    def _send(self, began: float) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number = self._sent
        request = self._requests[number]
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, **request["sampling"])
        prompt, adapter = {"prompt_token_ids": request["tokens"]}, self._adapter(request.get("adapter"))
        self._llm.llm_engine.add_request(str(number), prompt, params, lora_request=adapter)
        arrival_s = self._clock + (time.perf_counter() - began if self._steps else 0.0)
        self._live[str(number)] = {"number": number, "arrival_s": arrival_s, "tokens": 0, "token_ids": []}
        self._sent += 1

    def _adapter(self, path: str | None) -> Any:
        if path is None:
            return None
        if path not in self._adapters:
            from vllm.lora.request import LoRARequest

            self._adapters[path] = LoRARequest(Path(path).name, len(self._adapters) + 1, path)
        return self._adapters[path]

    def _take(self, output: Any, finished: list[dict[str, Any]]) -> None:
        live = self._live[output.request_id]
        made = output.outputs[0]
        live["tokens"] += len(made.token_ids)
        live["token_ids"] += made.token_ids
        if live["tokens"] and "first_s" not in live:
            live |= {"first_s": self._clock, "first_step": self._steps}
        if output.finished:
            end = {"reason": made.finish_reason, "end_s": self._clock, "end_step": self._steps}
            finished.append({**live, **end, "cached": output.num_cached_tokens})
            del self._live[output.request_id]

    def report(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "step_s": self._step_s,
            "clock_s": self._clock,
            "cpu_s": time.process_time() - self._cpu_began,
            "scheduler_s": self._scheduler_s,
            "preemptions": self._preemptions,
            "recomputed_tokens": self._recomputed,
        }

    def probe(self, tokens: list[int], sampling: dict[str, Any]) -> None:
        self.begin([{"tokens": tokens, "sampling": sampling}], 1)
        self.steps(1)
        self._llm.llm_engine.abort_request(["0"])
        self._live.clear()

    def metrics(self) -> dict[str, float]:
        from leap_rs.vllm.metrics import engine_files, read

        numbers = {}
        for path in engine_files():
            reading = read(path)
            for metric, value, row in reading.series() if reading is not None else ():
                name = f"{metric.name}/{value}" if value else metric.name
                numbers[f"{name}/sum" if metric.kind == "histogram" else name] = row[-1]
        return numbers

    def shut(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            self.clean_up()

    def clean_up(self) -> None:
        """Takes away what vLLM keeps of an engine that has ended, or has not begun."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    serve(EngineServer())
