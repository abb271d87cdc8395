"""Files of many types, found in the Python installation or made on the spot, for a model that tells types."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import plistlib
import sqlite3
import struct
import sys
import sysconfig
import tarfile
import wave
import zipfile
import zlib
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import numpy as np

STDLIB = Path(sysconfig.get_paths()["stdlib"])
_OF_EACH = 7


def files() -> Iterator[tuple[str, bytes]]:
    """(type, contents) of some 250 files of over 20 types."""
    yield from _found()
    sources = [path.read_bytes() for path in sorted(STDLIB.glob("*.py"), key=lambda path: path.stat().st_size)[40:]]
    for name, make in _MAKERS.items():
        for number in range(_OF_EACH):
            yield name, make(sources[5 * number : 5 * number + 5], number)


def _found() -> Iterator[tuple[str, bytes]]:
    for name, pattern, most in (
        ("python", "*.py", 50),
        ("pyc", "__pycache__/*.pyc", 20),
        ("text", "**/*.txt", 10),
        ("shell", "**/*.sh", 5),
        ("powershell", "venv/**/*.ps1", 2),
    ):
        yield from ((name, path.read_bytes()) for path in sorted(STDLIB.glob(pattern))[:most])
    headers = sorted(Path(sysconfig.get_paths()["include"]).glob("*.h"))
    yield from (("c", path.read_bytes()) for path in headers[:25])
    yield "elf", Path(sys.executable).resolve().read_bytes()
    yield from (("elf", path.read_bytes()) for path in sorted(STDLIB.glob("lib-dynload/*.so"))[:25])


def _zip(sources: list[bytes], number: int) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for i, source in enumerate(sources[: 1 + number % 5]):
            archive.writestr(f"part{i}.py", source)
    return target.getvalue()


def _tar(sources: list[bytes], number: int) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for i, source in enumerate(sources):
            info = tarfile.TarInfo(f"folder{number}/part{i}.py")
            info.size = len(source)
            archive.addfile(info, io.BytesIO(source))
    return target.getvalue()


def _pixels(number: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    y, x = np.mgrid[: 40 + number, : 60 + number]
    return np.stack([x * 4 + number, y * 5, (x * y) >> 3], axis=2).astype(np.uint8)


def _png(_: list[bytes], number: int) -> bytes:
    pixels = _pixels(number)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _bmp(_: list[bytes], number: int) -> bytes:
    pixels = _pixels(4 * number)  # rows of a multiple of four bytes
    size = pixels.nbytes
    header = struct.pack("<IiiHHIIiiII", 40, pixels.shape[1], pixels.shape[0], 1, 24, 0, size, 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + size, 0, 0, 54) + header + pixels[::-1].tobytes()


def _wave(_: list[bytes], number: int) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes((8000 * np.sin(np.arange(8000) * 0.05 * (number + 1))).astype("<i2").tobytes())
    return target.getvalue()


def _sqlite(sources: list[bytes], number: int) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "made.sqlite")
        connection = sqlite3.connect(path)
        connection.execute(f"CREATE TABLE sources{number} (id INTEGER PRIMARY KEY, text BLOB)")
        connection.executemany(f"INSERT INTO sources{number} (text) VALUES (?)", [(s[:500],) for s in sources])
        connection.commit()
        connection.close()
        return path.read_bytes()


def _rows(sources: list[bytes]) -> list[dict[str, object]]:
    lines = sources[0].decode(errors="replace").splitlines()[:120]
    return [{"number": i, "length": len(line), "text": line.strip()[:40]} for i, line in enumerate(lines)]


def _csv(sources: list[bytes], _: int) -> bytes:
    target = io.StringIO()
    writer = csv.DictWriter(target, ["number", "length", "text"])
    writer.writeheader()
    writer.writerows(_rows(sources))
    return target.getvalue().encode()


def _xml(sources: list[bytes], _: int) -> bytes:
    root = ElementTree.Element("lines")
    for row in _rows(sources):
        line = ElementTree.SubElement(root, "line", number=str(row["number"]))
        line.text = "".join(c for c in str(row["text"]) if c.isprintable())
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root)


def _html(sources: list[bytes], number: int) -> bytes:
    items = "".join(f"<li class='n'>{row['number']}: {row['length']}</li>\n" for row in _rows(sources))
    head = f"<head><meta charset='utf-8'><title>Lines {number}</title></head>"
    return f"<!DOCTYPE html>\n<html>\n{head}\n<body>\n<h1>Lines</h1>\n<ul>\n{items}</ul>\n</body>\n</html>\n".encode()


def _sql(sources: list[bytes], number: int) -> bytes:
    rows = "".join(f"INSERT INTO lines{number} VALUES ({r['number']}, {r['length']});\n" for r in _rows(sources))
    return f"CREATE TABLE lines{number} (number INTEGER PRIMARY KEY, length INTEGER NOT NULL);\n{rows}".encode()


def _svg(_: list[bytes], number: int) -> bytes:
    shapes = "".join(
        f'<circle cx="{10 * i}" cy="{(i * i + number) % 90}" r="4" fill="#{i * 9:02x}4080"/>\n' for i in range(25)
    )
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 250 100">\n'
    return f"{head}{shapes}</svg>\n".encode()


def _email(sources: list[bytes], number: int) -> bytes:
    message = EmailMessage()
    message["From"], message["To"] = "Ada <ada@example.org>", "Charles <charles@example.org>"
    message["Subject"], message["Date"] = f"Source number {number}", "Mon, 02 Nov 2026 10:00:00 +0000"
    message.set_content(sources[0].decode("ascii", errors="replace")[:1500])
    return bytes(message)


def _ini(sources: list[bytes], number: int) -> bytes:
    lines = "".join(f"[section{r['number']}]\nlength = {r['length']}\nname = item{number}\n\n" for r in _rows(sources))
    return lines.encode()


def _npz(_: list[bytes], number: int) -> bytes:
    target = io.BytesIO()
    np.savez(target, pixels=_pixels(number))
    return target.getvalue()


_MAKERS: dict[str, Callable[[list[bytes], int], bytes]] = {
    "zip": _zip,
    "tar": _tar,
    "gzip": lambda sources, _: gzip.compress(sources[0]),
    "bzip": lambda sources, _: bz2.compress(sources[0]),
    "xz": lambda sources, _: lzma.compress(sources[0]),
    "zlib": lambda sources, _: zlib.compress(sources[0]),
    "png": _png,
    "bmp": _bmp,
    "wav": _wave,
    "sqlite": _sqlite,
    "csv": _csv,
    "json": lambda sources, _: json.dumps(_rows(sources), indent=1).encode(),
    "jsonl": lambda sources, _: "\n".join(map(json.dumps, _rows(sources))).encode(),
    "xml": _xml,
    "html": _html,
    "sql": _sql,
    "svg": _svg,
    "eml": _email,
    "ini": _ini,
    "npz": _npz,
    "pickle": lambda sources, _: pickle.dumps(_rows(sources)),
    "plist": lambda sources, _: plistlib.dumps({"rows": _rows(sources)}),
    "binary plist": lambda sources, _: plistlib.dumps({"rows": _rows(sources)}, fmt=plistlib.FMT_BINARY),
}
