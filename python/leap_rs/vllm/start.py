"""What the scheduler starts with: what of vLLM's configuration it refuses, and what its brain and recorder are made of."""

from __future__ import annotations

from typing import Any

import vllm

from leap_rs import __version__
from leap_rs._leap import ConfigError, LeapError, PromptFeatures
from leap_rs.encoder.client import ClientSettings
from leap_rs.encoder.source import EncoderInfo, inspect

from .compat import LOG, diffuses
from .decoder import check_last_rank, layer_number
from .embedding import engine_number, load_table
from .given import given
from .online import OnlineBrain
from .options import LeapOptions, parse
from .reading import Reading
from .recorder import Recorder
from .settings import BrainSettings
from .state import published


def checked(config: Any) -> LeapOptions:
    """The options of a run with our scheduler, once nothing of them and of vLLM's configuration is to be refused.

    Raises:
        ConfigError: Names the option.
    """
    options = parse({"leap": given(config)}) or LeapOptions()
    refuse(config, options)
    return options


def refuse(config: Any, options: LeapOptions) -> None:
    """Refuses what cannot be ordered or learned from, by the configuration alone: each process asks before it loads a model.

    Raises:
        ConfigError: Names the option.
    """
    backend = config.parallel_config.distributed_executor_backend
    if getattr(backend, "__name__", backend) in ("external_launcher", "ExecutorWithExternalLauncher"):
        raise ConfigError(
            "distributed_executor_backend 'external_launcher': every rank schedules for itself and all must decide alike, "
            "but the order of leap-rs follows a clock and what a thread has learned"
        )
    if diffuses(config):
        raise ConfigError(
            "diffusion models: their answers are not written token by token, and vLLM has a scheduler of its own for them"
        )
    if config.scheduler_config.policy != "fcfs":
        raise ConfigError(
            f"scheduling policy {config.scheduler_config.policy!r}: leap-rs has an order of its own and needs fcfs"
        )
    if config.model_config.runner_type != "generate":
        raise ConfigError(f"runner {config.model_config.runner_type!r}: only generation has lengths to predict")
    if options.record is not None and options.record.exists() and not options.record.is_dir():
        raise ConfigError(f"additional_config: leap: record: {options.record} is a file, and parts need a directory")
    if options.has("evict") and config.kv_transfer_config is not None:
        raise ConfigError("additional_config: leap: levers: evict cannot be used with a KV connector")
    _check_layer(config, options)


def _check_layer(config: Any, options: LeapOptions) -> None:
    depth = config.model_config.hf_text_config.num_hidden_layers
    number, ranks = layer_number(depth, options.layer), config.parallel_config.pipeline_parallel_size
    if ranks > 1:
        from vllm.distributed.utils import get_pp_indices

        first, _ = get_pp_indices(depth, ranks - 1, ranks)
        check_last_rank(number, first, depth)


def prefills_only(config: Any) -> bool:
    """Whether this is an instance whose requests go on elsewhere after their first token."""
    transfer = config.kv_transfer_config
    return transfer is not None and getattr(transfer, "kv_role", None) == "kv_producer"


def settings_of(config: Any, options: LeapOptions) -> BrainSettings:
    """What the brain of this engine is for."""
    model = config.model_config
    return BrainSettings.from_options(
        options,
        model=model.served_model_name if isinstance(model.served_model_name, str) else model.model,
        weights=published(model.model),
        layer=layer_number(model.hf_text_config.num_hidden_layers, options.layer),
        width=model.get_hidden_size(),
        max_model_len=model.max_model_len,
        engine=engine_number(config),
    )


def encoder_of(config: Any, options: LeapOptions) -> ClientSettings | None:
    """What reads the text of prompts, if asked to; None, and a warning, where that cannot be: the server starts all the same."""
    asked, model = options.encoder, config.model_config
    if asked is None:
        return None
    if model.skip_tokenizer_init or not model.tokenizer:
        LOG.warning("leap: no text readout: the served model has no tokenizer to read prompts with")
        return None
    try:
        info = inspect(asked.model, asked.layer)
    except LeapError as error:
        LOG.warning("leap: no text readout: encoder: %s", error)
        return None
    return ClientSettings(info, str(model.tokenizer), asked.threads, asked.device)


def brain_and_recorder(config: Any, options: LeapOptions) -> tuple[OnlineBrain, Recorder | None]:
    """What predicts for this engine, and what writes down what it serves."""
    settings, table = settings_of(config, options), load_table(config)
    encoder = encoder_of(config, options)
    recorder = recorder_of(options, settings, table, encoder.info if encoder is not None else None)
    return OnlineBrain(settings, table, Reading(encoder, recorder)), recorder


def recorder_of(
    options: LeapOptions, settings: BrainSettings, table: PromptFeatures | None, encoder: EncoderInfo | None
) -> Recorder | None:
    """What writes down what this engine serves, if asked to."""
    if options.record is None:
        return None
    source = f"served by vLLM {vllm.__version__}, recorded by leap-rs {__version__}"
    metadata = {"model": settings.model, "layer": settings.layer, "source": source}
    if encoder is not None:
        metadata |= {"encoder": encoder.name, "encoder_layer": encoder.layer}
    return Recorder(options.record, settings.engine, metadata, table, options.record_every, text=encoder is not None)
