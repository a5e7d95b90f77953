"""Text files as rows that know their line."""

from pathlib import Path

from fsdprl.errors import UserError


class TextRows:
    """A row `{"text": line}` for each line of a .txt file that is not blank. Reads it whole.

    Raises UserError with file:line where it is not UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[tuple[int, str]] = []
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise UserError(
                        f"{path}:{number}: not valid UTF-8; save the file as UTF-8"
                    ) from None
                if text.strip():
                    self._lines.append((number, text))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": self._lines[index][1]}

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index][0]}"
