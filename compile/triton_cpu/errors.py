"""What can go wrong outside of a kernel's own code, and what a kernel reports."""


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


class KernelError(TritonCpuError):
    """A kernel reported a failure while it ran: names the kernel, the source line and the program. What its programs
    had stored by then stays."""


class KernelAssertionError(KernelError, AssertionError):
    """A condition of tl.device_assert did not hold."""


class OutOfBoundsError(KernelError, IndexError):
    """An access beyond the tensor that the pointer came from, in a kernel that was compiled with bounds checks."""
