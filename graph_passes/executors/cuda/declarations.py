"""Reads constants and structs from the CUDA sources, so that Python need not repeat them.

    cuda = Declarations("conv1x1_forward.cuh")
    TEAMS, ROWS = cuda.values("TEAMS", "ROWS")  # constexpr integers
    CONTROL_BYTES = cuda.sizeof("Control")      # bytes of a struct
    cuda.sizeof("Stage<Tile<2, 128>>")          # templates are named as in CUDA

    class Walk(ctypes.Structure):               # a struct that is a kernel's argument
        _fields_ = cuda.fields("TileStep")

The parser understands the declarations in kernels/: integer constants, and structs of numbers, vectors, pointers,
arrays and other structs. tests/graph_passes/cuda/test_declarations.py compares the results with the compiler's.
"""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("kernels")

_NUMBERS: Mapping[str, type[Any]] = {
    "int": ctypes.c_int, "uint32": ctypes.c_uint32, "uint64": ctypes.c_uint64, "float": ctypes.c_float,
    "double": ctypes.c_double, "uint8": ctypes.c_uint8, "uint16": ctypes.c_uint16, "bool": ctypes.c_bool}
_VECTOR = re.compile(r"(?:u?int|float)([24])")  # CUDA's vectors of 4-byte numbers, which are aligned to their size
_TOKEN = re.compile(r"0x[0-9a-fA-F]+|\d+|\w+|::|<<|<=|>=|==|!=|&&|\|\||[^\s\w]")
# Binary operators, lowest precedence first. Division requires nonnegative numbers.
_OPERATORS: Sequence[Mapping[str, Callable[[Any, Any], Any]]] = (
    {"||": lambda a, b: a or b}, {"&&": lambda a, b: a and b}, {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}, {"<<": operator.lshift},
    {"+": operator.add, "-": operator.sub}, {"*": operator.mul, "/": operator.floordiv, "%": operator.mod})


@dataclass(frozen=True)
class _Declared:
    """The text of a constant or a struct, which may be a template."""

    text: str  # a constant's value; a struct's members
    parameters: tuple[str, ...] = ()
    is_struct: bool = False
    alignment: int = 1  # the argument of `alignas`


@dataclass(frozen=True)
class _Member:
    """A member of a struct, an array or a single value, with the size and alignment of its type in bytes."""

    name: str
    type: type[Any] | None  # the ctypes type of the whole array; None for a vector
    size: int
    alignment: int


@dataclass(frozen=True)
class Declarations:
    """Constants and structs that kernels/`source` and its included files declare outside functions. An unknown name
    raises KeyError."""

    source: str

    def values(self, *constants: str) -> tuple[int, ...]:
        """The values of constants."""
        return tuple(map(self.value, constants))

    def value(self, constant: str) -> int:
        """The value of a constant, or of an expression of constants."""
        return int(_evaluated(self.source, constant))

    def sizeof(self, struct: str) -> int:
        """The bytes of a struct."""
        found: _Struct = _evaluated(self.source, struct)
        return found.size

    def fields(self, struct: str, **classes: type[ctypes.Structure]) -> list[tuple[str, type[Any]]]:
        """The fields of a struct, in the form that ctypes.Structure expects. `classes`: the ctypes classes of structs
        among the fields, by name. Raises TypeError for a vector, because ctypes has no vectors.
        """
        found: _Struct = _Parser(struct, {**_names(self.source), **classes}).expression()
        return found.fields

    def names(self) -> tuple[list[str], list[str]]:
        """The names of all constants and of all structs, without templates."""
        plain = {name: each for name, each in _names(self.source).items() if not each.parameters}
        return ([name for name, each in plain.items() if not each.is_struct],
                [name for name, each in plain.items() if each.is_struct])


@cache
def _evaluated(source: str, expression: str) -> Any:
    """The value of a constant, or a struct."""
    return _Parser(expression, _names(source)).expression()


@cache
def _names(source: str) -> dict[str, _Declared]:
    """The declarations of a source and of its included files, by name."""
    found: dict[str, _Declared] = {}
    for path in _included(source):
        found |= _declared(path)
    return found


@dataclass(frozen=True)
class _Struct:
    """A struct. Its constants and members are computed from the names of the enclosing scope."""

    declared: _Declared
    around: Mapping[str, Any] = field(repr=False)

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """The names of the enclosing scope and the struct's own constants."""
        own: dict[str, Any] = {}
        for statement in _statements(self.declared.text):
            if constants := re.fullmatch(r"static constexpr \w+ (.*)", statement):
                own |= dict(_constants(constants[1]))
        return {**self.around, **own}

    @cached_property
    def members(self) -> list[_Member]:
        return [member for statement in _statements(self.declared.text)
                if not statement.startswith(("static", "using")) for member in _Parser(statement, self.names).members()]

    @property
    def alignment(self) -> int:
        return max([self.declared.alignment, *(member.alignment for member in self.members)])

    @cached_property
    def size(self) -> int:
        end = 0
        for member in self.members:
            end = _rounded(end, member.alignment) + member.size
        return _rounded(max(end, 1), self.alignment)  # C++ gives an empty struct a byte

    @property
    def fields(self) -> list[tuple[str, type[Any]]]:
        found = []
        for member in self.members:
            if member.type is None:
                raise TypeError(f"ctypes has no type for the member {member.name}")
            found.append((member.name, member.type))
        return found


class _Parser:
    """Reads expressions and members of structs; `names` maps a name to its declaration or its value."""

    def __init__(self, text: str, names: Mapping[str, Any]) -> None:
        self._tokens, self._at, self._names = _TOKEN.findall(text), 0, names
        self._in_arguments = False  # inside template arguments, where `>` ends the list

    def expression(self) -> Any:
        """An expression a ? b : c, or one of higher precedence."""
        condition = self._binary(0)
        if not self._take("?"):
            return condition
        first = self.expression()
        self._expect(":")
        second = self.expression()
        return first if condition else second

    def members(self) -> Iterator[_Member]:
        """The members of one statement, such as `uint64 weights, full[2][MAX_STAGES]`."""
        alignment = 1
        if self._take("alignas"):
            alignment = self._in_parentheses()
        self._take("const")
        name = self._next()
        of_name = self._type(name)
        while True:
            kind = (ctypes.c_void_p, 8, 8) if self._take("*") else of_name
            yield self._member(kind, alignment)
            if not self._take(","):
                return

    def _member(self, kind: tuple[type[Any] | None, int, int], alignment: int) -> _Member:
        ctype, size, own = kind
        name = self._next()
        lengths = []
        while self._take("["):
            lengths.append(int(self.expression()))
            self._expect("]")
        for length in reversed(lengths):
            ctype, size = ctype and ctype * length, size * length
        if self._take("="):  # a default
            self.expression()
        return _Member(name, ctype, size, max(alignment, own))

    def _type(self, name: str) -> tuple[type[Any] | None, int, int]:
        """A ctypes type, its size and its alignment."""
        if name in _NUMBERS:
            return _NUMBERS[name], *(ctypes.sizeof(_NUMBERS[name]),) * 2
        if vector := _VECTOR.fullmatch(name):
            return None, *(4 * int(vector[1]),) * 2
        if name not in self._names and self._peek() == "*":
            return None, 0, 0  # an unknown type, of which only pointers occur
        struct = self._named(name)
        if isinstance(struct, type):
            return struct, ctypes.sizeof(struct), ctypes.alignment(struct)
        assert isinstance(struct, _Struct), name
        as_ctypes = None
        if all(member.type for member in struct.members) and struct.declared.alignment == 1:
            as_ctypes = type(name, (ctypes.Structure,), {"_fields_": struct.fields})
        return as_ctypes, struct.size, struct.alignment

    def _binary(self, level: int) -> Any:
        if level == len(_OPERATORS):
            return self._primary()
        left = self._binary(level + 1)
        while (token := self._peek()) in _OPERATORS[level] and not (token == ">" and self._in_arguments):
            left = _OPERATORS[level][self._next()](left, self._binary(level + 1))
        return left

    def _primary(self) -> Any:
        token = self._next()
        if token == "(":
            self._at -= 1
            return self._in_parentheses()
        if token == "-":
            return -self._primary()
        if token == "!":
            return not self._primary()
        if token in ("true", "false"):
            return token == "true"
        if token in _NUMBERS:  # a type conversion
            return self._in_parentheses()
        if token[0].isdigit():
            return int(token, 0)
        found = self._named(token)
        while self._take("::"):
            found = _resolved(found.names[self._next()], found.names, ())
        return found

    def _named(self, name: str) -> Any:
        """The value or declaration of the name, with its template arguments, if any."""
        found = self._names[name]
        arguments: list[Any] = []
        if isinstance(found, _Declared) and found.parameters and self._take("<"):
            outer, self._in_arguments = self._in_arguments, True
            arguments.append(self.expression())
            while self._take(","):
                arguments.append(self.expression())
            self._in_arguments = outer
            self._expect(">")
        return _resolved(found, self._names, arguments)

    def _in_parentheses(self) -> Any:
        self._expect("(")
        outer, self._in_arguments = self._in_arguments, False
        value = self.expression()
        self._in_arguments = outer
        self._expect(")")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, token: str) -> bool:
        """Read the next token if it equals `token`. Returns whether it did."""
        found = self._peek() == token
        self._at += found
        return found

    def _expect(self, token: str) -> None:
        found = self._next()
        assert found == token, f"{found} instead of {token} in {' '.join(self._tokens)}"


def _resolved(found: Any, names: Mapping[str, Any], arguments: Sequence[Any]) -> Any:
    """Evaluate a declared constant, or return the struct. A value is returned unchanged."""
    if not isinstance(found, _Declared):
        return found
    inside = {**names, **dict(zip(found.parameters, arguments, strict=True))}
    return _Struct(found, inside) if found.is_struct else _Parser(found.text, inside).expression()


@cache
def _included(source: str) -> tuple[Path, ...]:
    """The text of a source, preceded by all files that it includes."""
    path = SOURCES / source
    before: dict[Path, None] = {}
    for name in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE):
        before |= dict.fromkeys(_included(name))
    return *before, path


@cache
def _declared(path: Path) -> dict[str, _Declared]:
    """The constants and structs that begin a line."""
    text = re.sub(r"//.*", "", path.read_text())
    found: dict[str, _Declared] = {}
    for template, constants in re.findall(r"^(template <[^>]*>\s)?constexpr (?:int|bool|uint32|uint8) (\w+ = [^;{]*);",
                                          text, re.MULTILINE):
        for name, value in _constants(constants):
            found[name] = _Declared(value.text, _parameters(template))
    for struct in re.finditer(r"^(template <[^>]*>\s)?struct (?:alignas\((\d+)\) )?(\w+) {", text, re.MULTILINE):
        end = _end_of_braces(text, struct.end() - 1)
        found[struct[3]] = _Declared(text[struct.end():end], _parameters(struct[1]), is_struct=True,
                                     alignment=int(struct[2] or 1))
    return found


def _constants(text: str) -> Iterator[tuple[str, _Declared]]:
    """Names and values of `A = 1, B = 2 * A`."""
    for name, value in re.findall(r"(\w+) = (.*?)(?=, \w+ = |$)", " ".join(text.split())):
        yield name, _Declared(value)


def _parameters(template: str | None) -> tuple[str, ...]:
    """The names in `template <class T, int N>`."""
    return tuple(re.findall(r"(\w+)[,>]", template or ""))


def _statements(text: str) -> Iterator[str]:
    """The statements between a struct's braces, without functions and assertions, each in one line."""
    text = re.sub(r" = {[^}]*}", "", text)  # removes default values of members
    begin = at = 0
    while at < len(text):
        if text[at] == "{":
            begin = at = _end_of_braces(text, at) + 1
            continue
        if text[at] == ";":
            statement = " ".join(text[begin:at].split())
            if statement and not re.match(r"static_assert|__device__|\w+\(\) = default", statement):
                yield statement
            begin = at + 1
        at += 1


def _end_of_braces(text: str, begin: int) -> int:
    """The index of the closing brace for the opening brace at `begin`."""
    depth = 0
    for place in re.finditer("[{}]", text[begin:]):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return begin + place.start()
    raise AssertionError("unbalanced braces")


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
