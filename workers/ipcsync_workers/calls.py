"""The ``call`` of a stage: ``module:function``, imported with the pipeline's folder first on the path.

A pipeline is checked before anything starts, so its calls are imported once in a process of their own
(:func:`inspect_calls`): whatever a module does when imported (print, open a GPU, leave) is done to nobody else.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

GRAMMAR = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
PER_ITEM = "__ipcsync_per_item__"  # set by stage.per_item
GIVEN = ("xp", "stage")  # keyword-only arguments of a per_item function that are not params
_IMPORT_LIMIT = 120.0


class CallInvalid(Exception):
    """The call cannot be imported or is no stage; the message says why."""


class CallInfo(msgspec.Struct):
    """What a check has to know of a call. ``keywords``: a per_item function's own, True where one must be given."""

    error: str = ""
    per_item: bool = False
    keywords: dict[str, bool] = {}
    any_keyword: bool = False


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve(call: str, folder: Path) -> Callable[..., Any]:
    """The function that `call` names; :class:`CallInvalid` if there is none."""
    if not GRAMMAR.match(call):
        raise CallInvalid(f"{call!r} is not of the form module:function, as in 'stages:read'")
    module_name, _, attributes = call.partition(":")
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            hint = did_you_mean(module_name, (p.stem for p in folder.glob("*.py")))
            raise CallInvalid(f"there is no module {module_name!r} in {folder} or installed{hint}") from error
        raise CallInvalid(f"importing {module_name!r} failed: {error}") from error
    except BaseException as error:  # whatever a module raises, SystemExit too: it is named, not suffered
        if isinstance(error, KeyboardInterrupt):
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name} line {at.lineno}"
        raise CallInvalid(f"importing {module_name!r} raised {type(error).__name__}: {error} ({where})") from error
    found: Any = module
    for name in attributes.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, (n for n in dir(found) if callable(getattr(found, n, None))))
            raise CallInvalid(f"{module_name!r} has no {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise CallInvalid(f"{call!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def describe(call: str, folder: Path) -> CallInfo:
    """Imports the call here and says what it is."""
    try:
        function = resolve(call, folder)
        per_item = getattr(function, PER_ITEM, False)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a builtin without one
            return CallInfo()
        parameters = signature.parameters.values()
        keyword_only = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
        given = (("array", "out", "meta"), keyword_only) if per_item else (("stage",), {})
        try:
            signature.bind(*given[0], **given[1])
        except TypeError as error:
            takes = "(array, out, meta)" if per_item else "one argument, the stage"
            raise CallInvalid(f"{call!r} must take {takes}: {error}") from None
    except CallInvalid as error:
        return CallInfo(error=str(error))
    own = {name: needed for name, needed in keyword_only.items() if name not in GIVEN} if per_item else {}
    return CallInfo("", per_item, own, any(p.kind is p.VAR_KEYWORD for p in parameters))


def inspect_calls(calls: Iterable[str], folder: Path) -> dict[str, CallInfo]:
    """What each call is, found out in a fresh process."""
    wanted = sorted(set(calls))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __spec__.name, str(folder)],  # -P: where we are is not where the pipeline is
            input=json.dumps(wanted).encode(),
            capture_output=True,
            cwd=folder,
            timeout=_IMPORT_LIMIT,
        )
        found = msgspec.json.decode(done.stdout, type=dict[str, CallInfo])
    except subprocess.TimeoutExpired:
        return {call: CallInfo(error=f"importing it took more than {_IMPORT_LIMIT:g} s") for call in wanted}
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        reason = f"importing ended the process with status {done.returncode}" + "".join(f": {s}" for s in said)
        return {call: CallInfo(error=reason) for call in wanted}
    return found


def _main() -> None:
    folder = Path(sys.argv[1])
    calls = json.loads(sys.stdin.buffer.read())
    answer = sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):
        found = {call: describe(call, folder) for call in calls}
    answer.write(msgspec.json.encode(found))
    answer.flush()


if __name__ == "__main__":
    _main()
