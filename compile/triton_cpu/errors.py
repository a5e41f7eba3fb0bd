"""What can go wrong outside of a kernel's own code."""


class TritonCpuError(RuntimeError):
    """Base of the backend's errors."""


class CompilerNotFoundError(TritonCpuError):
    """No C++ compiler on this machine."""


class CompileError(TritonCpuError):
    """The C++ compiler refused a source."""


class RecordingError(TritonCpuError):
    """Something that cannot happen while launches are being recorded."""


class SettingError(TritonCpuError, ValueError):
    """A setting has a value that it does not know, or that this machine cannot follow."""
