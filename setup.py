"""The compiled kernels, for setuptools; everything else is in pyproject.toml.

One source is compiled once per instruction set. Where there is no compiler the build goes on
without the extension, and the reference kernels serve.
"""

import platform
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path(__file__).parent / "kernels" / "cpu"
SOURCES = runpy.run_path(str(FOLDER / "sources.py"))
BUILDS = SOURCES["isa_flags"](platform.machine())
LINEAR_BUILDS = SOURCES["linear_isa_flags"](platform.machine())


class BuildKernels(build_ext):
    """Compiles each source with its flags, side by side, and links them into one module."""

    def build_extension(self, ext):
        """See ``setuptools``; raises CompileError, which it takes as a warning."""
        flags = list(SOURCES["COMMON_FLAGS"])
        module = [(f"KVFERRY_HAVE_{isa}", None) for isa in LINEAR_BUILDS]
        module.append(("KVFERRY_SOURCES", f'"{SOURCES["sources_digest"](FOLDER)}"'))
        jobs = [(source, "module", module, flags) for source in SOURCES["MODULE_SOURCES"]]
        jobs += [
            (SOURCES["KERNEL_SOURCE"], isa, [("KVFERRY_ISA", isa)], flags + list(extra))
            for isa, extra in BUILDS.items()
        ]
        jobs += [
            (SOURCES["LINEAR_SOURCE"], isa, [("KVFERRY_ISA", isa)], flags + list(extra))
            for isa, extra in LINEAR_BUILDS.items()
        ]

        def compile_one(job):
            source, name, macros, extra = job
            return self.compiler.compile(
                [str(Path("kernels", "cpu", "src", source))],
                output_dir=str(Path(self.build_temp, name)),
                macros=macros,
                include_dirs=ext.include_dirs,
                extra_postargs=extra,
                depends=ext.depends,
            )

        with ThreadPoolExecutor() as pool:
            objects = [path for paths in pool.map(compile_one, jobs) for path in paths]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=self.get_libraries(ext),
            library_dirs=ext.library_dirs,
            extra_postargs=["-fopenmp"],
            export_symbols=self.get_export_symbols(ext),
            build_temp=self.build_temp,
            target_lang="c++",
        )


sources = [str(path.relative_to(Path(__file__).parent)) for path in SOURCES["source_files"](FOLDER)]
extension = Extension(
    SOURCES["EXTENSION"],
    sources=[path for path in sources if path.endswith(".cpp")],
    depends=[*sources, "kernels/cpu/sources.py", "setup.py"],
    language="c++",
    optional=True,
)
setup(ext_modules=[extension] if BUILDS else [], cmdclass={"build_ext": BuildKernels})
