"""In place of SGLang's compiled kernels, of which the package index has none for CPUs.

SGLang imports some by name and calls them on CPUs with AMX, or for drafts; elsewhere it computes with torch. So every
name is there, and says so if it is called.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **more):
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs")

    return missing
