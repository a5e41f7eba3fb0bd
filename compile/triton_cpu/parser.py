"""TTIR's text to `ir.Module`.

MLIR prints most operations in one of few shapes: words and operands, attributes in braces, then types after a colon.
One reader takes them all; only control flow and functions have a grammar of their own.
"""

from vllm_triton.compile.triton_cpu.ir import Block, Function, Module, Operation, Region, Type, Value
from vllm_triton.compile.triton_cpu.scanner import ParseError, Scanner, constant, unescape

__all__ = ["ParseError", "parse"]


def parse(text: str) -> Module:
    """Raises: ParseError, which shows the text where it stopped."""
    return _Parser(text).module()


class _Parser(Scanner):
    def __init__(self, text: str):
        super().__init__(text)
        self.values: dict[str, Value] = {}

    def module(self) -> Module:
        functions = {}
        while self.peek()[0] != "end":
            kind, token = self.peek()
            if kind == "hash":
                self.position = self.text.find("\n", self.position) + 1 or len(self.text)
                self._skip_space()
            elif token == "tt.func":
                function = self.function()
                functions[function.name] = function
            elif token == "module":
                while not self.accept("{"):
                    if self.accept("attributes"):
                        self.expect("{")
                        self.attributes()
                    else:
                        self.next()
            elif token == "}":
                self.next()
                self.location()
            else:
                raise self.error("a function")
        return Module(functions)

    def function(self) -> Function:
        self.next()
        public = False
        while self.peek()[0] == "word":
            public |= self.next()[1] == "public"
        name = self.next()[1][1:].strip('"')
        outer, self.values = self.values, {}
        arguments = self._arguments()
        results = self.types() if self.accept("->") else []
        if self.accept("attributes"):
            self.expect("{")
            self.attributes()
        body = self.region(arguments)
        self.location()
        self.values = outer
        return Function(name, arguments, results, body, public)

    def _arguments(self) -> list[Value]:
        """`(%a: type {attributes} loc(...), ...)`"""
        self.expect("(")
        values = []
        while not self.accept(")"):
            name = self.next()[1]
            self.expect(":")
            values.append(self._define(name, self.type()))
            if self.accept("{"):
                self.attributes()
            values[-1].name = self.argument_name() or values[-1].name
            self.accept(",")
        return values

    def _define(self, name: str, type_: Type, producer: Operation | None = None) -> Value:
        value = self.values[name] = Value(name[1:], type_, producer)
        return value

    def _use(self, name: str) -> Value:
        if name not in self.values:
            raise self.error(f"a defined value instead of {name}")
        return self.values[name]

    def region(self, arguments: list[Value] | None = None) -> Region:
        self.expect("{")
        blocks = [] if self.peek()[0] == "block" else [Block("entry", arguments or [])]
        while not self.accept("}"):
            if self.peek()[0] == "block":
                label = self.next()[1][1:]
                blocks.append(Block(label, self._arguments() if self.at("(") else []))
                self.expect(":")
            else:
                blocks[-1].operations.append(self.operation())
        return Region(blocks)

    def _structured(self, arguments: list[Value] | None = None) -> Region:
        """The body of a loop or branch; MLIR leaves out a yield that yields nothing."""
        region = self.region(arguments)
        operations = region.block.operations
        if not operations or operations[-1].name not in ("scf.yield", "scf.condition"):
            operations.append(Operation("scf.yield", [], [], [], {}, [], [], self.lines.unknown))
        return region

    def operation(self) -> Operation:
        names: list[tuple[str, int]] = []
        while self.peek()[0] == "value":
            name = self.next()[1]
            count = int(self.next()[1]) if self.accept(":") else 0
            names.append((name, count))
            if not self.accept(","):
                self.expect("=")
                break
        kind, name = self.next()
        operation = Operation(name.strip('"') if kind == "string" else name, [], [], [], {}, [], [], "")
        parse_rest = {
            "scf.for": self._for,
            "scf.if": self._if,
            "scf.while": self._while,
            "arith.constant": self._constant,
        }.get(operation.name, self._plain)
        result_types = parse_rest(operation)
        operation.line = self.location() or self.lines.unknown
        for value in operation.operands:
            value.uses.append(operation)
        for _, values in operation.successors:
            for value in values:
                value.uses.append(operation)
        flat = [f"{name}#{index}" for name, count in names for index in range(count)] if names and names[0][1] else None
        flat = flat if flat is not None else [name for name, _ in names]
        if len(flat) != len(result_types):
            raise self.error(f"{len(flat)} result types of {operation.name}, not {len(result_types)},")
        operation.results = [
            self._define(name, type_, operation) for name, type_ in zip(flat, result_types, strict=True)
        ]
        return operation

    def _constant(self, operation: Operation) -> list[Type]:
        if self.peek()[1] == "{":
            self.next()
            self.attributes()
        kind, token = self.peek()
        if token in ("true", "false"):
            self.next()
            operation.attributes["value"] = token == "true"
            return [Type("i1")]
        if token == "dense":
            dense = self.attribute()
            operation.attributes["value"] = dense.numbers()
            return [dense.type]
        if kind != "number":
            raise self.error("a number")
        self.next()
        self.expect(":")
        type_ = self.type()
        operation.attributes["value"] = constant(token, type_.element)
        return [type_]

    def _for(self, operation: Operation) -> list[Type]:
        self.accept("unsigned")
        index = self.next()[1]
        self.expect("=")
        operation.operands.append(self._use(self.next()[1]))
        for word in ("to", "step"):
            self.expect(word)
            operation.operands.append(self._use(self.next()[1]))
        names, types = self._carried(operation)
        self.expect(":")
        index_value = self._define(index, self.type())
        arguments = [index_value, *(self._define(name, type_) for name, type_ in zip(names, types, strict=True))]
        operation.regions.append(self._structured(arguments))
        if self.accept("{"):
            operation.attributes = self.attributes()
        return types

    def _carried(self, operation: Operation) -> tuple[list[str], list[Type]]:
        """`iter_args(%a = %b, ...) -> (types)`"""
        names: list[str] = []
        if not self.accept("iter_args"):
            return names, []
        names = self._bindings(operation)
        self.expect("->")
        return names, self.types()

    def _bindings(self, operation: Operation) -> list[str]:
        """`(%inside = %outside, ...)`; the outside values become operands."""
        names = []
        self.expect("(")
        while not self.accept(")"):
            names.append(self.next()[1])
            self.expect("=")
            operation.operands.append(self._use(self.next()[1]))
            self.accept(",")
        return names

    def _if(self, operation: Operation) -> list[Type]:
        operation.operands.append(self._use(self.next()[1]))
        types = self.types() if self.accept("->") else []
        operation.regions.append(self._structured())
        if self.accept("else"):
            operation.regions.append(self._structured())
        if self.accept("{"):
            operation.attributes = self.attributes()
        return types

    def _while(self, operation: Operation) -> list[Type]:
        names = self._bindings(operation) if self.at("(") else []
        self.expect(":")
        before_types = self.types()
        types = before_types
        if self.accept("->"):
            types = self.types()
        arguments = [self._define(name, type_) for name, type_ in zip(names, before_types, strict=True)]
        operation.regions.append(self._structured(arguments))
        self.expect("do")
        operation.regions.append(self._structured())
        if self.accept("attributes"):
            self.expect("{")
            operation.attributes = self.attributes()
        return types

    def _plain(self, operation: Operation) -> list[Type]:
        """Everything else: operands, words and attributes in any order, then `: types`."""
        depth = 0
        while True:
            kind, token = self.peek()
            if token == ":" and depth == 0:
                self.next()
                if self._followed_by_operands(operation):
                    continue
                return self._result_types(operation)
            if kind == "end" or token == "loc" or (token == "}" and depth == 0):
                return []
            self.next()
            if kind == "value":
                operation.operands.append(self._use(token))
            elif kind == "block":
                operation.successors.append((token[1:], self._branch_arguments()))
            elif token == "{":
                if self._starts_region():
                    self.position = self.text.rfind("{", 0, self.position)
                    operation.regions.append(self.region())
                else:
                    operation.attributes |= self.attributes()
            elif kind in ("word", "number") and self.accept("="):
                operation.attributes[token] = self.attribute()
            elif kind in ("word", "symbol", "string"):
                operation.words.append(unescape(token) if kind == "string" else token)
            elif token in "([<":
                depth += 1
            elif token in ")]>":
                depth -= 1

    def _followed_by_operands(self, operation: Operation) -> bool:
        """tt.print writes its operands after a first colon."""
        return operation.name == "tt.print" and self.peek()[0] == "value"

    def _starts_region(self) -> bool:
        brace = self.text.rfind("{", 0, self.position)
        return "\n" in self.text[brace : self.position]

    def _branch_arguments(self) -> list[Value]:
        """`(%a, %b : types)` of a branch."""
        values: list[Value] = []
        if self.accept("("):
            while self.peek()[0] == "value":
                values.append(self._use(self.next()[1]))
                self.accept(",")
            self.expect(":")
            while not self.accept(")"):
                self.type()
                self.accept(",")
        return values

    def _result_types(self, operation: Operation) -> list[Type]:
        """The types after the colon, and from them those of the results."""
        before = self.types()
        while self.accept(",") or self.accept("*"):
            before += self.types()
        if self.accept("->") or self.accept("to"):
            after = self.types()
            while self.accept(","):
                after += self.types()
            return after * 2 if operation.name == "tt.split" else after
        return _implied_results(operation, before)


def _implied_results(operation: Operation, types: list[Type]) -> list[Type]:
    name, last = operation.name, types[-1]
    if name in _NO_RESULT:
        return []
    if name in ("arith.cmpi", "arith.cmpf"):
        return [last.with_element("i1")]
    if name == "tt.load":
        return [Type(last.pointee or "", last.shape)]
    if name == "tt.addptr":
        return [types[0]]
    if name == "tt.split":
        return [last, last]
    return [last]


_NO_RESULT = {
    "scf.yield",
    "scf.condition",
    "tt.store",
    "tt.return",
    "tt.reduce.return",
    "tt.scan.return",
    "tt.map_elementwise.return",
    "tt.assert",
    "tt.print",
    "cf.br",
    "cf.cond_br",
    "gpu.barrier",
    "ttg.barrier",
    "ttg.local_barrier",
    "llvm.intr.assume",
}
