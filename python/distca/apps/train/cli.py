"""The command `distca train`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from distca.apps.common import memory_log
from distca.apps.common.files import writing
from distca.apps.common.options import INTERRUPTED, ConfigError, add_debug, interrupt_on_sigterm, tell
from distca.apps.common.ranks import start_ranks
from distca.apps.common.run_lock import LOCK, locked
from distca.apps.train.config import OPTION_TYPES, TrainConfig, option_name
from distca.apps.train.corpora import check_held_out, read_corpora
from distca.apps.train.log import create_run_dir
from distca.apps.train.metrics import describe
from distca.apps.train.presets import PRESETS
from distca.apps.train.resume import find_run, resumed_config
from distca.connect.rank_process import exit_now, keep_freed_memory, leave_process_group
from distca.errors import DistcaError
from distca.trace import nsys
from distca.trace.nsys import switched_on

_BY_ENVIRONMENT = {"nsys": nsys.VARIABLE, "log_memory": memory_log.VARIABLE}


def add_command(commands: Any) -> None:
    """Adds `train` to the parser of the command line."""
    command = commands.add_parser(
        "train",
        help="train a language model with balanced attention",
        description="Trains a language model on CPU ranks, with attention balanced over the ranks. By default it "
        "trains a tiny Llama on the sources of Python's standard library. It starts its own ranks on this machine; "
        "under torchrun each process is one rank. It writes figures and a report to a folder in --runs-dir.",
    )
    for option in fields(TrainConfig):
        default = "" if option.default is None or option.default is False else f" (default: {option.default})"
        about: dict[str, Any] = {
            "default": argparse.SUPPRESS,  # options that were not given are missing: a resumed run keeps its own
            "help": option.metadata["help"] + default,
        }
        if OPTION_TYPES[option.name] is bool:
            about["action"] = argparse.BooleanOptionalAction
        else:
            about |= {"type": OPTION_TYPES[option.name], "choices": option.metadata["choices"]}
        if option.metadata["bare"] is not None:
            about |= {"nargs": "?", "const": option.metadata["bare"], "metavar": "FILE"}
        names = [option_name(option.name), *([option.metadata["also"]] if option.metadata["also"] else [])]
        command.add_argument(*names, dest=option.name, **about)
    command.add_argument(
        "--resume",
        metavar="RUN|latest",
        help="continue the run in this folder from its last checkpoint, with the options of that run; latest means the "
        "run in --runs-dir with the newest checkpoint",
    )
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Raises DistcaError for a mistake."""
    given = {option.name: getattr(options, option.name) for option in fields(TrainConfig) if option.name in options}
    for name in given.keys() & {"data", "eval_data", "tokenizer"}:  # the run may be resumed from another folder
        given[name] = given[name].absolute()
    if "model" in given and given["model"] not in PRESETS and Path(given["model"]).exists():
        given["model"] = str(Path(given["model"]).absolute())
    for name, variable in _BY_ENVIRONMENT.items():
        if name not in given and switched_on(variable):
            given[name] = True
    if _under_torchrun():
        given["ranks"] = _torchrun_ranks(given.get("ranks"))
    if options.resume is None:
        config, run_dir = TrainConfig(**given), None
    else:
        run_dir = find_run(options.resume, given.get("runs_dir", TrainConfig.runs_dir))
        config = resumed_config(run_dir, given)
    _check_packages(config)
    _check_inputs(config)
    if _under_torchrun():
        return _train_as_rank(config, run_dir, options.debug)
    return _train_with_own_ranks(config, run_dir)


def _check_inputs(config: TrainConfig) -> None:
    """Finds mistakes in data, model and tokenizer before anything is started."""
    if config.trace and (not Path(config.trace).parent.is_dir() or Path(config.trace).is_dir()):
        raise ConfigError(f"--trace is {config.trace}, must be a file in a folder that exists")
    if config.export is not None and config.export.exists() and not _is_empty(config.export):
        raise ConfigError(f"--export is {config.export}, must be a new or empty folder")
    tokenizer = None
    if config.tokenizer is not None:
        from distca.apps.common.tokens import Tokenizer

        tokenizer = Tokenizer(config.tokenizer)
    corpus, held_out = read_corpora(config, tokenizer, show_progress=True)
    vocabulary = corpus.vocabulary(tokenizer)
    if config.is_split:
        from distca.apps.train.split_run import check_before_start

        check_before_start(config, vocabulary)
    if config.model is not None or tokenizer is not None:
        from distca.apps.train.model import check_positions, model_config

        corpora = [corpus] if held_out is None else [corpus, held_out]
        longest = max(length for one in corpora for length in one.lengths())
        shape = model_config(config, vocabulary)[0]
        check_positions(shape, config, longest)
        vocabulary = shape.get_text_config().vocab_size
    check_held_out(held_out, vocabulary)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _torchrun_ranks(asked: int | None) -> int:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE, as under torchrun, but not {' and '.join(missing)}: set what is "
            "missing, or unset RANK and WORLD_SIZE, and ranks are started here"
        )
    for name in ("RANK", "WORLD_SIZE"):
        if not os.environ[name].isdecimal():
            raise ConfigError(
                f"environment variable {name} is {os.environ[name]!r}, must be an integer, as of torchrun"
            )
    world_size = int(os.environ["WORLD_SIZE"])
    if asked is not None and asked != world_size:
        raise ConfigError(f"--ranks is {asked}, must be torchrun's world size ({world_size}) or left out")
    return world_size


def train_rank(config: TrainConfig, run_dir: Path | None) -> dict[str, Any]:
    """Runs training on one rank. The trainer is imported here; the command itself then need not load transformers."""
    import torch.distributed as dist

    from distca.apps.train.progress import log_to_stderr
    from distca.apps.train.trainer import train

    log_to_stderr(dist.get_rank())
    return train(config, run_dir)


def _check_packages(config: TrainConfig) -> None:
    for package in ("tqdm", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the package {package} is not installed: pip install {package}")
    try:
        import distca.integrations.hf_version  # noqa: F401
    except ImportError as error:
        raise ConfigError(str(error)) from error
    if config.track is not None and importlib.util.find_spec(config.track) is None:
        raise ConfigError(f"--track is {config.track}, which is not installed: pip install {config.track}")
    if config.nsys and not torch.cuda.is_available():
        raise ConfigError(
            f"--nsys (or {nsys.VARIABLE}=1) needs a GPU and a PyTorch with CUDA, which are not here: leave it out, or "
            "use --trace"
        )
    if config.ping_pong and importlib.util.find_spec("greenlet") is None:
        raise ConfigError("--ping-pong needs the package greenlet: pip install greenlet")


def _train_with_own_ranks(config: TrainConfig, resumed: Path | None) -> int:
    interrupt_on_sigterm()
    with _run_folder(config, resumed) as run_dir:
        of_ranks = start_ranks(train_rank, config, run_dir, ranks=config.ranks, imports=["distca.apps.train.trainer"])
    return _finish(of_ranks[0])


@contextmanager
def _run_folder(config: TrainConfig, resumed: Path | None) -> Iterator[Path]:
    """The folder of the run, locked against other runs. A new one is removed if a failure leaves nothing in it."""
    run_dir = resumed if resumed is not None else create_run_dir(config)
    with ExitStack() as held:
        with writing(run_dir):
            held.enter_context(locked(run_dir))
        try:
            yield run_dir
        except BaseException:
            with suppress(OSError):
                if [path.name for path in run_dir.iterdir()] == [LOCK]:
                    shutil.rmtree(run_dir)
            raise


def _train_as_rank(config: TrainConfig, resumed: Path | None, debug: bool) -> int:
    import torch.distributed as dist

    keep_freed_memory()
    rank = int(os.environ["RANK"])
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = _run_folder(config, resumed) if rank == 0 else nullcontext(resumed)
    try:
        with folder as run_dir:
            dist.init_process_group("gloo")
            summary = train_rank(config, run_dir)
            leave_process_group()
    except BaseException as error:
        if isinstance(error, DistcaError):
            code = tell(error, "train", debug)
        elif isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        else:
            traceback.print_exc()
            code = 1
        exit_now(code)
    return _finish(summary) if rank == 0 else INTERRUPTED if summary["interrupted"] else 0


def _finish(summary: dict[str, Any]) -> int:
    print(describe(summary))
    return INTERRUPTED if summary["interrupted"] else 0
