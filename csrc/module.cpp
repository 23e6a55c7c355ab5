// The importable module infloss._C: loading it registers the ops of ops.cpp; its attributes say
// what the library was built with.

#include <Python.h>

static PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                 "_C",
                                 "Compiled part of infloss.",
                                 -1,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

PyMODINIT_FUNC PyInit__C(void) {
    PyObject* module = PyModule_Create(&module_def);
    if (module == nullptr) return nullptr;
    if (PyModule_AddStringConstant(module, "CUDA_ARCHS", INFLOSS_CUDA_ARCHS) < 0 ||
        PyModule_AddStringConstant(module, "CUDA_VERSION", INFLOSS_CUDA_VERSION) < 0 ||
        PyModule_AddStringConstant(module, "TORCH_VERSION", INFLOSS_TORCH_VERSION) < 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
