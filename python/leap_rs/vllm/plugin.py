"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, in every run.

So it does next to nothing: it has vLLM tell it about each configuration, each executor, each worker and each set of
engines that is made, and leaves them alone unless the run asks for leap-rs. Where it does, what is wrong with the
configuration is told before a model is loaded, the worker taps its model right after having loaded it, before anything is
compiled, and engines that have something to save get the time for it when they are stopped.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from leap_rs._leap import ConfigError, LeapError

from .given import KEY, given, set_aside
from .places import name_run

# Below vLLM's own logger, so that lines come out in its format.
LOG = logging.getLogger("vllm.leap_rs")
_MARK = "leap_registered"
TAP_KEY = "leap_tap"
GRACE_S = 15.0
"""An engine waits for its workers first, five seconds and after a signal four more, before it tells its scheduler."""


def register() -> None:
    """Makes vLLM's workers tap the models that they load, where a run asks for it. Calling it again changes nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    name_run()
    _give_time_to_save(CoreEngineProcManager)
    # The front end, the engine core and the worker may be processes of their own, on machines of their own.
    _wrap(EngineArgs, "create_engine_config", _checks_what_it_makes)
    _wrap(Executor, "__init__", _checks_what_it_is_given)
    # Not the creation of a worker: a worker's process loads its plugins only in the midst of that.
    _wrap(WorkerWrapperBase, "init_device", _taps)


def _wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Puts what `around` makes of a method in its place, once."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(around(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def _checks_what_it_makes(original: Any) -> Any:
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        check(config)
        return config

    return create


def _checks_what_it_is_given(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check(vllm_config)
        place = _wait_for_table(vllm_config, self)
        try:
            original(self, vllm_config, *args, **kwargs)
        except BaseException:
            if place is not None:
                from .handover import clear

                clear(place)
            raise

    return init


def _wait_for_table(vllm_config: Any, executor: Any) -> Path | None:
    """Has the workers know that the scheduler to come reads their table, where it does; the place of the table."""
    if not reads_table(vllm_config):
        return None
    from .embedding import table_path
    from .handover import wait

    try:
        place = table_path(vllm_config)
        wait(place, executor)
    except LeapError:
        # The scheduler will look for the table, and says then that it has none.
        return None
    return place


def _taps(original: Any) -> Any:
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self.vllm_config)
        if selected(self.vllm_config):
            _tap_when_loaded(self.worker, self.vllm_config)
        return original(self, *args, **kwargs)

    return init_device


def check(vllm_config: Any) -> None:
    """Refuses a run that asks for leap-rs and cannot have it: here, before a model is loaded and compiled.

    Raises:
        ConfigError: Names what is wrong.
    """
    if _schedules(vllm_config):
        from .start import checked

        checked(vllm_config)
    elif selected(vllm_config):
        from .options import parse

        parse({KEY: given(vllm_config)})
    if selected(vllm_config):
        check_parallel(vllm_config)


def selected(vllm_config: Any) -> bool:
    """Whether a run asks for leap-rs: by its scheduler, or by options for it."""
    if getattr(vllm_config.model_config, "runner_type", "generate") != "generate":
        return False
    return _schedules(vllm_config) or given(vllm_config) is not None


def _schedules(vllm_config: Any) -> bool:
    scheduler = vllm_config.scheduler_config.scheduler_cls
    module = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "")
    return str(module).startswith("leap_rs.vllm")


def reads_table(vllm_config: Any) -> bool:
    """Whether the scheduler that this process will make reads the table of embeddings: ours, or one made of ours."""
    # Of the executors on several nodes only the first has a scheduler.
    if not selected(vllm_config) or getattr(vllm_config.parallel_config, "node_rank_within_dp", 0) > 0:
        return False
    from .start import prefills_only

    if prefills_only(vllm_config):
        return False
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if not _schedules(vllm_config) and isinstance(scheduler, str):
        # What is wrong with its name is vLLM's to say.
        with suppress(Exception):
            scheduler = pkgutil.resolve_name(scheduler)
    return _schedules(vllm_config) or bool(getattr(scheduler, "leap_reads_table", False))


def _options(vllm_config: Any) -> Mapping[str, Any] | None:
    options = given(vllm_config)
    return options if isinstance(options, Mapping) else None


def _give_time_to_save(manager: Any) -> None:
    """Lets engines end by themselves that have something to save.

    By default a server that is stopped kills its engines right after it has asked them to end; requests are aborted at
    once all the same.
    """
    # Before there was a time to set, vLLM waited by itself.
    if hasattr(manager, _MARK) or not hasattr(manager, "shutdown"):
        return
    made, original = manager.__init__, manager.shutdown

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("vllm_config")
        options = _options(config) if config is not None and selected(config) else None
        self.leap_saves = any((options or {}).get(name) for name in ("state_dir", "record"))
        made(self, *args, **kwargs)

    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> Any:
        return original(self, GRACE_S if timeout == 0 and getattr(self, "leap_saves", False) else timeout)

    setattr(manager, _MARK, True)
    manager.__init__, manager.shutdown = init, shutdown


def _tap_when_loaded(worker: Any, vllm_config: Any) -> None:
    original = worker.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(vllm_config):
            tap_model(worker.model_runner, vllm_config)
        return result

    worker.load_model = load_model


def tap_model(runner: Any, vllm_config: Any) -> None:
    """Taps the model that a model runner has loaded and writes the table of its projected embeddings.

    Raises:
        ConfigError: The model is none that can be tapped.
    """
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    from .capture import OPERATOR, Tap, fingerprint, install
    from .decoder import find_site, language_model
    from .embedding import leave_table
    from .start import prefills_only
    from .transport import connect

    model_config = vllm_config.model_config
    model = runner.get_model()
    depth = model_config.hf_text_config.num_hidden_layers
    answers = get_tensor_model_parallel_rank() == 0
    if get_pp_group().is_first_rank and not prefills_only(vllm_config):
        leave_table(language_model(model), vllm_config, answers=answers, device=runner.device)
    wanted = (_options(vllm_config) or {}).get("layer")
    site = find_site(model, depth, wanted, vllm_config.parallel_config.tensor_parallel_size, runner.device)
    if site is None:
        return
    rows = vllm_config.scheduler_config.max_num_seqs
    tap = Tap(rows, model_config.get_hidden_size(), model_config.dtype, runner.device)
    install(site.layer, site.name, tap)
    _mark_compilation(vllm_config, fingerprint(site.name), OPERATOR)
    if answers:
        connect(runner, tap)
    LOG.info(
        "leap: reading the hidden state after %d of %d decoder layers of %s", site.number, depth, type(model).__name__
    )


def check_parallel(vllm_config: Any) -> None:
    """Refuses, from the configuration alone, batches that are spread over devices in a way that cannot be tapped.

    Raises:
        ConfigError: Names the setting.
    """
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0):
        raise ConfigError(
            "leap: a batch that is split into microbatches (--enable-dbo, --ubatch-size) cannot be tapped"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("leap: prompts that are split over devices (prefill context parallelism) cannot be tapped")
    if getattr(parallel, "use_sequence_parallel_moe", False):
        raise ConfigError(
            "leap: rows that are split over devices (sequence-parallel experts: expert parallelism with tensor and data "
            "parallelism) cannot be tapped"
        )
    passes = vllm_config.compilation_config.pass_config
    if parallel.tensor_parallel_size > 1 and getattr(passes, "enable_sp", False):
        raise ConfigError("leap: a residual stream that is split over devices (enable_sp) cannot be tapped")


def _mark_compilation(vllm_config: Any, fingerprint: str, operator: str) -> None:
    """Lets vLLM's compile cache tell a tapped model from the same model untapped, and breaks CUDA graphs at the tap.

    All of `additional_config` is part of the cache's key. How requests are ordered is nothing to compile anew for, so our
    options are set aside. Between the pieces of a graph Python runs, so that the rows leave for the CPU while the later
    layers still compute.
    """
    additional = vllm_config.additional_config
    if isinstance(additional, dict):
        set_aside(vllm_config)
        vllm_config.additional_config[TAP_KEY] = fingerprint
    splitting = vllm_config.compilation_config.splitting_ops
    if splitting and operator not in splitting:
        splitting.append(operator)
