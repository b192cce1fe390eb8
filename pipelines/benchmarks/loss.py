"""``magrpo bench loss``: times the loss with :mod:`magrpo_kernels.bench`."""

from argparse import Namespace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from magrpo.errors import ConfigError
from magrpo_kernels.bench import check_options, make_parser, measure_loss
from pipelines.arguments import Positive

Size = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]


def bench_loss(
    *,
    device: Literal["cpu", "cuda"] | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    tokens: Size = None,
    hidden: Size = None,
    vocabulary: Size = None,
    sequences: Positive = 32,
    rounds: Positive = 7,
    no_compile: Annotated[bool, Parameter(negative=())] = False,
    json: Path | None = None,
) -> int:
    """Print a table for each form of the loss, and the ratios with their targets; the exit code is 0.

    Raises ConfigError if the options do not fit each other or the machine.

    Args:
        device: Where to compute; default: a GPU if there is one.
        dtype: Precision of hidden states and head; default: bfloat16 with a GPU, else float32.
        tokens: Number of tokens; default: 16384 with a GPU, else 4096.
        hidden: Width of the model; default: 4096 with a GPU, else 256.
        vocabulary: Size of the vocabulary; default: 151936 with a GPU, else 32768.
        sequences: Number of sequences of equal length that the tokens are of.
        rounds: Number of times that each implementation is timed.
        no_compile: Leave out torch.compile, which takes a minute.
        json: Also write everything to this file.
    """
    sizes = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "sequences": sequences, "rounds": rounds}
    options = {"device": device, "dtype": dtype, **sizes, "no_compile": no_compile, "json": json}
    given = Namespace(**{name: value for name, value in options.items() if value is not None})
    args = make_parser().parse_args([], given)
    try:
        check_options(args)
    except ValueError as error:
        raise ConfigError(f"bench loss: {error}") from None
    measure_loss(args)
    return 0
