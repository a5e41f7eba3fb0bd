// The launcher as a Python type: reads a kernel's arguments out of Python objects and launches, in well under a
// microsecond. Without Python's headers, launcher.py does the same through ctypes.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstring>

#include "launcher.h"

using namespace triton_cpu;

namespace {

// As many 8-byte slots as CUDA gives a kernel's parameters (4 KB).
constexpr Py_ssize_t kMostSlots = 512;
// Grid (3), stream, function, packed metadata, launch metadata, enter hook, exit hook; the kernel's own follow.
constexpr Py_ssize_t kLeadingArguments = 9;

PyObject* text_data_ptr;
PyObject* text_is_cpu;
PyObject* text_device;
PyObject* text_calls;

struct Launcher {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject* kernel_name;
    PyObject* codes;        // bytes, one code an argument; "(" and ")" hold a tuple's
    PyObject* names;        // tuple of str, one for each top-level argument
    PyObject* get_threads;  // callable without arguments
    PyObject* fail;         // callable with a failure's number and text, which raises
};

// Where in the arguments an error is: for its message.
struct Position {
    const Launcher* launcher;
    Py_ssize_t argument;

    PyObject* name() const { return PyTuple_GET_ITEM(launcher->names, argument); }
};

bool read_pointer(const Position& position, PyObject* value, uint64_t* slot) {
    PyObject* is_cpu = PyObject_GetAttr(value, text_is_cpu);
    if (is_cpu != Py_True) {
        // Wrappers of a tensor have a device and a data_ptr, and nothing else.
        PyErr_Clear();
        Py_XDECREF(is_cpu);
        PyObject* device = PyObject_GetAttr(value, text_device);
        if (!device) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%U: argument %R must be a CPU tensor, got %.100s", position.launcher->kernel_name,
                         position.name(), Py_TYPE(value)->tp_name);
            return false;
        }
        PyObject* device_text = PyObject_Str(device);
        Py_DECREF(device);
        if (!device_text) return false;
        bool on_cpu = std::strncmp(PyUnicode_AsUTF8(device_text), "cpu", 3) == 0;
        if (!on_cpu)
            PyErr_Format(PyExc_ValueError, "%U: argument %R must be a CPU tensor, got one on %U: move it with .cpu()",
                         position.launcher->kernel_name, position.name(), device_text);
        Py_DECREF(device_text);
        if (!on_cpu) return false;
    } else {
        Py_DECREF(is_cpu);
    }
    PyObject* address = PyObject_CallMethodNoArgs(value, text_data_ptr);
    if (!address) return false;
    *slot = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    return !(*slot == uint64_t(-1) && PyErr_Occurred());
}

bool out_of_range(const Position& position, PyObject* value, const char* type) {
    PyErr_Clear();
    PyErr_Format(PyExc_OverflowError, "%U: argument %R must fit %s, got %R", position.launcher->kernel_name,
                 position.name(), type, value);
    return false;
}

bool read_integer(const Position& position, PyObject* object, char code, uint64_t* slot) {
    PyObject* value = PyNumber_Index(object);
    if (!value) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%U: argument %R must be an integer, got %.100s", position.launcher->kernel_name,
                     position.name(), Py_TYPE(object)->tp_name);
        return false;
    }
    bool fits = true;
    const char* type = "";
    if (code == 'L') {
        type = "u64";
        *slot = PyLong_AsUnsignedLongLong(value);
        fits = !PyErr_Occurred();
    } else {
        int overflow = 0;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        int64_t low = 0, high = 0;
        switch (code) {
            case '?': type = "i1", low = 0, high = 1; break;
            case 'b': type = "i8", low = INT8_MIN, high = INT8_MAX; break;
            case 'h': type = "i16", low = INT16_MIN, high = INT16_MAX; break;
            case 'i': type = "i32", low = INT32_MIN, high = INT32_MAX; break;
            case 'l': type = "i64", low = INT64_MIN, high = INT64_MAX; break;
            case 'B': type = "u8", high = UINT8_MAX; break;
            case 'H': type = "u16", high = UINT16_MAX; break;
            case 'I': type = "u32", high = UINT32_MAX; break;
        }
        fits = overflow == 0 && number >= low && number <= high;
        *slot = uint64_t(number);
    }
    Py_DECREF(value);
    return fits || out_of_range(position, object, type);
}

bool read_float(const Position& position, PyObject* object, char code, uint64_t* slot) {
    double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%U: argument %R must be a number, got %.100s", position.launcher->kernel_name,
                     position.name(), Py_TYPE(object)->tp_name);
        return false;
    }
    *slot = 0;
    float single = float(value);
    if (code == 'd')
        std::memcpy(slot, &value, sizeof value);
    else
        std::memcpy(slot, &single, sizeof single);
    return true;
}

// Reads one argument by its code, or a whole tuple; moves `code` and `slot` behind what was read.
bool read_argument(const Position& position, PyObject* value, const char** code, uint64_t** slot) {
    char kind = *(*code)++;
    switch (kind) {
        case 'c': return true;
        case 'p': return read_pointer(position, value, (*slot)++);
        case 'f':
        case 'd': return read_float(position, value, kind, (*slot)++);
        case '(': {
            PyObject* items = PySequence_Fast(value, "expected a tuple");
            if (!items) return false;
            bool good = true;
            Py_ssize_t index = 0;
            for (; good && **code != ')' && index < PySequence_Fast_GET_SIZE(items); ++index)
                good = read_argument(position, PySequence_Fast_GET_ITEM(items, index), code, slot);
            if (good && (**code != ')' || index != PySequence_Fast_GET_SIZE(items))) {
                PyErr_Format(PyExc_ValueError, "%U: argument %R must be a tuple as long as the kernel was compiled for",
                             position.launcher->kernel_name, position.name());
                good = false;
            }
            ++*code;
            Py_DECREF(items);
            return good;
        }
        default: return read_integer(position, value, kind, (*slot)++);
    }
}

// Triton's chains of hooks are there even where nobody hooked anything.
bool call_hook(PyObject* hook, PyObject* metadata) {
    if (hook == Py_None) return true;
    PyObject* calls = PyObject_GetAttr(hook, text_calls);
    bool empty = calls && PyList_Check(calls) && PyList_GET_SIZE(calls) == 0;
    if (!calls) PyErr_Clear();
    Py_XDECREF(calls);
    if (empty) return true;
    PyObject* result = PyObject_CallOneArg(hook, metadata);
    Py_XDECREF(result);
    return result != nullptr;
}

bool read_grid(const Launcher* self, PyObject* const* args, Grid* grid) {
    int32_t sizes[3];
    for (int axis = 0; axis < 3; ++axis) {
        int overflow = 0;
        int64_t size = PyLong_AsLongLongAndOverflow(args[axis], &overflow);
        if (size == -1 && PyErr_Occurred()) return false;
        if (overflow || size < 0 || size > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "%U: grid[%d] must be from 0 to 2**31 - 1, got %R", self->kernel_name, axis,
                         args[axis]);
            return false;
        }
        sizes[axis] = int32_t(size);
    }
    *grid = {sizes[0], sizes[1], sizes[2]};
    return true;
}

bool succeeded(const Launcher* self, const Report& report) {
    if (!tcpu::failed(&report)) return true;
    PyObject* text = PyUnicode_DecodeUTF8(report.text, Py_ssize_t(std::strlen(report.text)), "replace");
    if (!text) return false;
    PyObject* result = PyObject_CallFunction(self->fail, "iN", int(report.kind), text);
    Py_XDECREF(result);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%U: the kernel failed", self->kernel_name);
    return false;
}

bool launch(const Launcher* self, Kernel* kernel, const uint64_t* slots, Py_ssize_t count, Grid grid) {
    if (grid.size() == 0) return true;
    if (recorder) {
        recorder->append(kernel, slots, size_t(count), grid);
        return true;
    }
    Report report;
    clear(report);
    // A grid of a few microseconds does not hand the interpreter over: another thread would keep it for milliseconds.
    int64_t ran = run_if_short(*kernel, slots, grid, &report);
    if (ran == grid.size()) return succeeded(self, report);
    PyObject* threads_object = PyObject_CallNoArgs(self->get_threads);
    if (!threads_object) return false;
    int threads = int(PyLong_AsLong(threads_object));
    Py_DECREF(threads_object);
    if (threads == -1 && PyErr_Occurred()) return false;
    Py_BEGIN_ALLOW_THREADS;
    run(*kernel, slots, grid, ran, threads, &report);
    Py_END_ALLOW_THREADS;
    return succeeded(self, report);
}

PyObject* launcher_call(PyObject* object, PyObject* const* args, size_t flagged_count, PyObject* keywords) {
    const Launcher* self = reinterpret_cast<Launcher*>(object);
    Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
    Py_ssize_t wanted = kLeadingArguments + PyTuple_GET_SIZE(self->names);
    if (count != wanted || (keywords && PyTuple_GET_SIZE(keywords) > 0)) {
        PyErr_Format(PyExc_TypeError, "%U: the launcher takes %zd positional arguments, got %zd", self->kernel_name,
                     wanted, count);
        return nullptr;
    }
    Grid grid;
    if (!read_grid(self, args, &grid)) return nullptr;
    auto* kernel = static_cast<Kernel*>(PyLong_AsVoidPtr(args[4]));
    if (!kernel) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%U: the kernel is not loaded", self->kernel_name);
        return nullptr;
    }
    uint64_t slots[kMostSlots];
    uint64_t* slot = slots;
    const char* code = PyBytes_AS_STRING(self->codes);
    for (Py_ssize_t argument = 0; argument < count - kLeadingArguments; ++argument)
        if (!read_argument({self, argument}, args[kLeadingArguments + argument], &code, &slot)) return nullptr;

    if (!call_hook(args[7], args[6])) return nullptr;
    if (!launch(self, kernel, slots, slot - slots, grid)) return nullptr;
    if (!call_hook(args[8], args[6])) return nullptr;
    Py_RETURN_NONE;
}

PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *kernel_name, *codes, *names, *get_threads, *fail;
    if (!PyArg_ParseTuple(args, "USO!OO", &kernel_name, &codes, &PyTuple_Type, &names, &get_threads, &fail))
        return nullptr;
    if (PyBytes_GET_SIZE(codes) > kMostSlots) {
        PyErr_Format(PyExc_ValueError, "%U: a kernel takes at most %zd arguments", kernel_name, kMostSlots);
        return nullptr;
    }
    auto* self = reinterpret_cast<Launcher*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->vectorcall = launcher_call;
    self->kernel_name = Py_NewRef(kernel_name);
    self->codes = Py_NewRef(codes);
    self->names = Py_NewRef(names);
    self->get_threads = Py_NewRef(get_threads);
    self->fail = Py_NewRef(fail);
    return reinterpret_cast<PyObject*>(self);
}

void launcher_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<Launcher*>(object);
    Py_XDECREF(self->kernel_name);
    Py_XDECREF(self->codes);
    Py_XDECREF(self->names);
    Py_XDECREF(self->get_threads);
    Py_XDECREF(self->fail);
    Py_TYPE(object)->tp_free(object);
}

PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject make_launcher_type() {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "triton_cpu_launcher.Launcher";
    type.tp_basicsize = sizeof(Launcher);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    type.tp_vectorcall_offset = offsetof(Launcher, vectorcall);
    type.tp_call = PyVectorcall_Call;
    type.tp_new = launcher_new;
    type.tp_dealloc = launcher_dealloc;
    type.tp_members = launcher_members;
    type.tp_doc = "Launcher(kernel_name, codes, names, get_threads, fail): launches kernels of one signature.";
    return type;
}

PyTypeObject launcher_type = make_launcher_type();

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "triton_cpu_launcher", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_triton_cpu_launcher() {
    text_data_ptr = PyUnicode_InternFromString("data_ptr");
    text_is_cpu = PyUnicode_InternFromString("is_cpu");
    text_device = PyUnicode_InternFromString("device");
    text_calls = PyUnicode_InternFromString("calls");
    if (!text_data_ptr || !text_is_cpu || !text_device || !text_calls) return nullptr;
    if (PyType_Ready(&launcher_type) < 0) return nullptr;
    PyObject* module = PyModule_Create(&module_definition);
    if (module && PyModule_AddObjectRef(module, "Launcher", reinterpret_cast<PyObject*>(&launcher_type)) < 0)
        Py_CLEAR(module);
    return module;
}
