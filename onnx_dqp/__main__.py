"""The command ``python -m onnx_dqp``, also installed as ``onnx-dqp``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_dqp.console import UsageError, count, ending_cleanly, fail, one_line, printable, progress, run_command
from onnx_dqp.dequantize import dequantize
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.rules import OUTPUT_DTYPES, TYPE_NAMES, find_format, packed_size, shown

PROGRAM = "onnx-dqp"

TYPES = {name: number for number, name in TYPE_NAMES.items()}
"""Names of the operator's output types, as arguments."""

KINDS = (".npy", ".pb")
"""Files of arrays that are written and read."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; ``--help`` says the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(fail(PROGRAM, f"{message} ({self.prog} --help)"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Models that use ONNX's DequantizePacked: look into them, check, run and convert them.",
        epilog="exit status: 0 done; 1 check found problems; 2 bad usage, or input that cannot be read",
    )
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], what: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"example:\n  {PROGRAM} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    add("formats", _formats, "list the block formats and their layouts", "formats")

    command = add(
        "inspect", _inspect, "list a model's packed tensors, or a GGUF file's tensors", "inspect model.onnx --json"
    )
    command.add_argument("model", type=Path, help="a model or a GGUF file")
    command.add_argument("--json", action="store_true", help="print JSON")

    command = add("check", _check, "find all that is wrong with a model's DequantizePacked nodes", "check model.onnx")
    command.add_argument("model", type=Path)

    command = add(
        "expand",
        _expand,
        "replace DequantizePacked nodes by standard operators",
        "expand model.onnx expanded.onnx --opset 21",
    )
    _add_files(command)
    command.add_argument("--inline", action="store_true", help="put the operators in the graph, not in local functions")

    command = add(
        "fold",
        _fold,
        "replace packed tensors by the floating-point tensors that they stand for",
        "fold model.onnx folded.onnx --dtype float16 --external-data",
    )
    _add_files(command)
    command.add_argument("--dtype", choices=TYPES, help="the tensors' type (default: each node's own)")

    command = add(
        "from-gguf",
        _from_gguf,
        "make a model whose outputs are a GGUF file's tensors",
        "from-gguf model.gguf model.onnx --select 'blk.0.*'",
    )
    command.add_argument("input", type=Path, metavar="IN", help="a GGUF file, or one of its shards")
    command.add_argument(
        "output", type=Path, metavar="OUT", help="the model to write, in the folder of IN; its weights stay in IN"
    )
    command.add_argument(
        "--copy", action="store_true", help="write the bytes to OUT.data; done anyway with a big-endian file"
    )
    _add_select(command, "tensors")
    command.add_argument("--dtype", choices=TYPES, default="float", help="the outputs' type, but for integers (float)")
    command.add_argument(
        "--skip-unsupported", action="store_true", help="leave out tensors that cannot be used, and list them"
    )

    command = add(
        "pack",
        _pack,
        "replace a model's floating-point weights by packed ones",
        "pack model.onnx packed.onnx --format gguf:q4_k",
    )
    _add_input_and_output(command)
    command.add_argument("--format", required=True, help="a block format, such as gguf:q4_k")
    _add_select(command, "initializers", "; default: those of two dimensions or more and 4096 elements or more")
    command.add_argument(
        "--quantizer",
        choices=("ggml", "gguf"),
        help="ggml's compiled library, or the package gguf (the first that can)",
    )
    _add_external_data(command)

    command = add(
        "run",
        _run,
        "run a model in onnx_dqp.ReferenceEvaluator",
        "run model.onnx --input x=x.npy --output-dir results",
    )
    command.add_argument("model", type=Path)
    command.add_argument(
        "--input", action="append", default=[], metavar="NAME=FILE", help="an input, .npy or .pb (repeatable)"
    )
    command.add_argument("--output-dir", type=Path, metavar="DIR", help="write the outputs there")
    command.add_argument("--output-format", choices=("pb", "npy"), default="pb", help="of those files (pb)")

    command = add(
        "decode",
        _decode,
        "decode a payload's bytes to an array",
        "decode gguf:q4_0 --shape 2,32 payload.bin -o weights.npy",
    )
    command.add_argument("format")
    command.add_argument("file", help="the payload; - is standard input")
    command.add_argument("--shape", type=_shape, required=True, metavar="D,D,...", help="the array's dimensions")
    command.add_argument("--dtype", choices=TYPES, default="float", help="the array's type (float)")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a .npy or .pb file to write")

    command = add("explain", _explain, "take one block of a payload apart", "explain gguf:q4_k payload.bin --block 3")
    command.add_argument("format")
    command.add_argument("file", help="the payload; - is standard input")
    command.add_argument("--block", type=int, default=0, metavar="N", help="which block (0)")
    command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_files(command: argparse.ArgumentParser) -> None:
    _add_input_and_output(command)
    command.add_argument("--opset", type=int, metavar="N", help="the opset of the result, 18 to 29 (default 28)")
    _add_external_data(command)


def _add_select(command: argparse.ArgumentParser, what: str, default: str = "") -> None:
    command.add_argument(
        "--select", action="append", metavar="GLOB", help=f"only {what} of such names (repeatable{default})"
    )


def _add_input_and_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("input", type=Path, metavar="IN", help="a model; its external data lie beside it")
    command.add_argument("output", type=Path, metavar="OUT", help="the model to write; may not be IN")


def _add_external_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--external-data",
        action="store_true",
        help="write large tensors to OUT.data; done anyway for a model over 2 GiB. Without it, external data stay in "
        "their files where OUT is in the folder of IN, and are copied to OUT.data where it is not",
    )


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(dim) for dim in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, expected dimensions such as 2,32") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    with ending_cleanly():
        return run_command(PROGRAM, lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    if find_spec("rich") is None:
        raise UsageError("rich is not installed: pip install 'onnx_dqp[cli]'")
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    # ValueError: PackedTensorError, OpsetError, ModelFileError, functions in a circle. ImportError: of an extra.
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None


def _report(path: Path, before: ModelProto, after: ModelProto, what: str) -> None:
    from onnx_dqp.models.files import tensors  # noqa: PLC0415
    from onnx_dqp.models.scopes import declared_opset, external, packed_nodes  # noqa: PLC0415

    left = sum(1 for _ in packed_nodes(after))
    done = sum(1 for _ in packed_nodes(before)) - left
    stay = f", {left} without a constant payload {'stays' if left == 1 else 'stay'}" if left else ""
    data = sorted({external(tensor)["location"] for tensor in tensors(after) if "location" in external(tensor)})
    where = f" (data in {', '.join(data)})" if data else ""
    print(printable(f"{path}{where}: {count(done, 'node')} {what}{stay}, opset {declared_opset(after)}"))


def _formats(_: argparse.Namespace) -> int:
    from onnx_dqp.listing import list_formats  # noqa: PLC0415

    list_formats()
    return 0


def _inspect(parsed: argparse.Namespace) -> int:
    from onnx_dqp.listing import list_gguf, list_model  # noqa: PLC0415
    from onnx_dqp.models.gguf_file import is_gguf  # noqa: PLC0415

    (list_gguf if is_gguf(parsed.model) else list_model)(parsed.model, parsed.json)
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from onnx_dqp.models.check import check  # noqa: PLC0415
    from onnx_dqp.models.files import ModelFileError, octets, read_model, tensors  # noqa: PLC0415
    from onnx_dqp.models.scopes import external, packed_nodes  # noqa: PLC0415

    model = read_model(parsed.model)
    problems = [str(problem) for problem in check(model)]
    for tensor in filter(external, tensors(model)):
        try:
            octets(tensor, parsed.model.parent)  # only mapped: whether they are there
        except ModelFileError as error:
            problems.append(str(error))
    for problem in problems:
        print(printable(problem, 1000))
    if problems:
        return 1
    print(f"no problem in {count(len(list(packed_nodes(model))), 'node')}")
    return 0


def _files(parsed: argparse.Namespace) -> ModelProto:
    """The input model, after a look at what is to be written."""
    from onnx_dqp.models.files import demand_other_files, octets, read_model, tensors  # noqa: PLC0415
    from onnx_dqp.models.scopes import external  # noqa: PLC0415

    output: Path = parsed.output
    written = (output, _data_file(output))
    _check_outputs(written, [parsed.input])
    model = read_model(parsed.input)
    demand_other_files(model, parsed.input.parent, *written)
    for tensor in tensors(model):
        if external(tensor):
            octets(tensor, parsed.input.parent)  # only mapped: whether they are there
    return model


def _check_outputs(written: Iterable[Path], read: Iterable[Path]) -> None:
    for path in written:
        _check_output(path)
        for other in read:
            if path.exists() and other.exists() and path.samefile(other):
                raise UsageError(f"{path} is the input, expected another file to write")


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, expected a file to write")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no ordinary file, expected one to write")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder")


def _data_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.data")


def _expand(parsed: argparse.Namespace) -> int:
    from onnx_dqp.models.expand import expand  # noqa: PLC0415
    from onnx_dqp.models.files import DataFile, write_model  # noqa: PLC0415

    model = _files(parsed)
    result = expand(model, opset=_opset(parsed.opset), inline=parsed.inline)
    with DataFile(_data_file(parsed.output)) as data, progress("copying", bytes=True) as update:
        base = parsed.input.parent
        write_model(result, parsed.output, base, data, everything=parsed.external_data, progress=update)
    _report(parsed.output, model, result, "expanded")
    return 0


def _opset(number: int | None) -> int:
    from onnx_dqp.models.opsets import checked_opset  # noqa: PLC0415

    return checked_opset(number)


def _fold(parsed: argparse.Namespace) -> int:
    from onnx_dqp.models.check import demand_valid  # noqa: PLC0415
    from onnx_dqp.models.files import MOST_INLINE, DataFile, write_model  # noqa: PLC0415
    from onnx_dqp.models.fold import folded, folded_size  # noqa: PLC0415

    model = _files(parsed)
    demand_valid(model)
    dtype = TYPES[parsed.dtype] if parsed.dtype else None
    base = parsed.input.parent
    everything = parsed.external_data or folded_size(model, dtype) + model.ByteSize() > MOST_INLINE
    with DataFile(_data_file(parsed.output)) as data:
        with progress("decoding", bytes=True) as update:
            result = folded(model, dtype, parsed.opset, base, data if everything else None, update)
        with progress("copying", bytes=True) as update:
            write_model(result, parsed.output, base, data, everything=everything, progress=update)
    _report(parsed.output, model, result, "folded")
    return 0


def _from_gguf(parsed: argparse.Namespace) -> int:
    from onnx_dqp.models.files import DataFile, write_model  # noqa: PLC0415
    from onnx_dqp.models.from_gguf import build, copying, demand_linkable, linked, usable  # noqa: PLC0415
    from onnx_dqp.models.gguf_file import read_gguf  # noqa: PLC0415

    output: Path = parsed.output
    _check_outputs((output, _data_file(output)), [parsed.input])
    source = read_gguf(parsed.input)
    _check_outputs((output, _data_file(output)), source.paths)
    tensors, left_out = usable(source, parsed.select, parsed.skip_unsupported)
    copy = parsed.copy or any(tensor.big_endian for tensor in tensors)
    if not copy:
        if not output.parent.samefile(parsed.input.parent):
            raise UsageError(f"{output} is not in the folder of {parsed.input}, to which it refers; or --copy its data")
        demand_linkable(tensors)
    with DataFile(_data_file(output)) as data:
        with progress("copying", bytes=True) as update:
            store = copying(data, tensors, update) if copy else linked
            model = build(source, tensors, TYPES[parsed.dtype], store)
        write_model(model, output, output.parent, data, everything=False)
    for tensor in left_out:
        print(printable(f"left out {tensor.name!r}: {tensor.problem}", 300))
    size = f"{sum(tensor.size for tensor in tensors):,}"
    files = _data_file(output).name if copy else ", ".join(sorted({tensor.path.name for tensor in tensors}))
    packed = sum(tensor.format is not None for tensor in tensors)
    where = f"{size} bytes {'copied to' if copy else 'of'} {files}"
    print(printable(f"{output}: {count(len(tensors), 'tensor')}, {packed} of them packed; {where}", 1000))
    return 0


def _pack(parsed: argparse.Namespace) -> int:
    from onnx_dqp.models.files import MOST_INLINE, DataFile, write_model  # noqa: PLC0415
    from onnx_dqp.models.pack import inline_size, pack_into  # noqa: PLC0415
    from onnx_dqp.quantizers import find_quantizer  # noqa: PLC0415

    format = find_format(parsed.format)
    quantize = find_quantizer(parsed.quantizer, format)
    model = _files(parsed)
    base = parsed.input.parent
    everything = parsed.external_data or inline_size(model, format, parsed.select) > MOST_INLINE
    with DataFile(_data_file(parsed.output)) as data:
        with progress("quantizing") as update:
            made = pack_into(model, format, parsed.select, quantize, base, data if everything else None, update)
        with progress("copying", bytes=True) as update:
            write_model(made.model, parsed.output, base, data, everything=everything, progress=update)
    for name, reason in made.kept:
        print(printable(f"{name!r} stays: {reason}", 300))
    what = f"{count(made.count, 'initializer')} of {made.before:,} bytes packed as {format.identifier}"
    print(printable(f"{parsed.output}: {what}, {made.after:,} bytes", 1000))
    return 0


def _run(parsed: argparse.Namespace) -> int:
    import onnx  # noqa: PLC0415

    from onnx_dqp.evaluator import ReferenceEvaluator  # noqa: PLC0415
    from onnx_dqp.models.files import read_model  # noqa: PLC0415

    if parsed.output_dir is not None and not parsed.output_dir.is_dir():
        raise UsageError(f"{parsed.output_dir} is no folder")
    model = read_model(parsed.model)
    inputs = {}
    for text in parsed.input:
        name, separator, file = text.partition("=")
        if not separator:
            raise UsageError(f"--input {text!r}, expected NAME=FILE")
        inputs[name] = _read_array(Path(file))
    try:
        onnx.load_external_data_for_model(model, str(parsed.model.parent))
        evaluator = ReferenceEvaluator(model)
        wanted = [value.name for value in model.graph.input]
        optional = {tensor.name for tensor in model.graph.initializer}
        for name in inputs:
            if name not in wanted:
                raise UsageError(f"the model has no input {name!r}, expected {', '.join(map(repr, wanted)) or 'none'}")
        for name in wanted:
            if name not in inputs and name not in optional:
                raise UsageError(f"input {name!r} is missing: --input {name}=FILE")
        with np.errstate(all="ignore"):  # infinities and NaN are values here
            outputs = evaluator.run(None, inputs)
    except (UsageError, PackedTensorError):
        raise
    except Exception as error:
        raise UsageError(f"{parsed.model}: {one_line(error)}") from None
    taken: set[str] = set()
    for value, name in zip(outputs, evaluator.output_names, strict=True):
        if not isinstance(value, np.ndarray):
            raise UsageError(f"output {name!r} is a {type(value).__name__}, expected a tensor")
        print(f"{printable(name)}: {value.dtype.name}{list(value.shape)}")
        if parsed.output_dir is not None:
            stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "output"
            while stem in taken:
                stem += "_"
            taken.add(stem)
            _write_array(parsed.output_dir / f"{stem}.{parsed.output_format}", value, name)
    return 0


def _read_array(path: Path) -> NDArray[Any]:
    from onnx_dqp.models.files import read_tensor  # noqa: PLC0415

    if path.suffix not in KINDS:
        raise UsageError(f"{path}: expected a file {' or '.join(KINDS)}")
    try:
        if path.suffix == ".pb":
            return read_tensor(path)
        array: NDArray[Any] = np.load(path, allow_pickle=False)
        return array
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path}: {one_line(error)}") from None


def _write_array(path: Path, array: NDArray[Any], name: str) -> None:
    from onnx_dqp.models.files import NewFile  # noqa: PLC0415

    if path.suffix == ".npy" and array.dtype == OUTPUT_DTYPES[TensorProto.BFLOAT16]:
        raise UsageError(f"{path}: .npy cannot hold BFLOAT16, expected .pb")
    with NewFile(path) as new:
        if path.suffix == ".npy":
            np.save(new.file, array)
        else:
            try:
                new.file.write(numpy_helper.from_array(array, name).SerializeToString())
            except Exception as error:
                if isinstance(error, OSError):
                    raise
                raise UsageError(f"{path}: {one_line(error)}; .npy has no limit of 2 GiB") from None
        new.commit()


def _payload(name: str, most: int) -> NDArray[np.uint8]:
    """A payload's bytes; of what is no ordinary file, no more than one over ``most``."""
    if name == "-":
        return np.frombuffer(sys.stdin.buffer.read(most + 1), np.uint8)
    path = Path(name)
    if path.is_file() and path.stat().st_size:
        return np.memmap(path, np.uint8, "r")
    with path.open("rb") as file:
        return np.frombuffer(file.read(most + 1), np.uint8)


def _decode(parsed: argparse.Namespace) -> int:
    if parsed.output.suffix not in KINDS:
        raise UsageError(f"{parsed.output}: expected a name that ends in {' or '.join(KINDS)}")
    _check_output(parsed.output)
    given = Path(parsed.file)
    if parsed.file != "-" and parsed.output.exists() and given.exists() and parsed.output.samefile(given):
        raise UsageError(f"{parsed.output} is the input, expected another file to write")
    dtype = TYPES[parsed.dtype]
    payload = _payload(parsed.file, min(packed_size(parsed.format, parsed.shape), sys.maxsize - 1))
    array = dequantize(payload, parsed.format, parsed.shape, dtype)
    _write_array(parsed.output, array, "y")
    print(f"{parsed.output}: {array.dtype.name}{list(array.shape)}")
    return 0


def _explain(parsed: argparse.Namespace) -> int:
    from onnx_dqp.formats.explain import take_apart  # noqa: PLC0415

    format = find_format(parsed.format)
    if not 0 <= parsed.block < 1 << 40:
        raise UsageError(f"block {shown(parsed.block)}, expected the number of a block, from 0 on")
    start = parsed.block * format.bytes
    payload = _payload(parsed.file, start + format.bytes)
    count = len(payload) // format.bytes
    if parsed.block >= count:
        found = f"{len(payload)} bytes, which hold {count} whole blocks of {format.bytes}"
        raise UsageError(f"block {parsed.block}, but {parsed.file} has {found}")
    block = take_apart(parsed.format, payload[start : start + format.bytes])
    print(json.dumps(block.as_dict(), indent=1) if parsed.json else block)
    return 0


if __name__ == "__main__":
    sys.exit(main())
