"""CSV files as rows that know their line. Every cell is a string, as it stands in the file:
types guessed from cells would turn "0.50" into 0.5, and "NA" or an empty cell into a missing value.
"""

import csv
from array import array
from pathlib import Path

from fsdprl.errors import UserError

_MOST_CHARACTERS = 2**31 - 1  # of a cell; the reader's own limit of 128 KiB is a short document


class CsvRows:
    """The rows of a .csv (comma) or .tsv (tab) file with a header. Reads it whole.

    Raises UserError with file:line for a row that is no CSV, not UTF-8 or not as wide as the
    header, and for a header with an empty or repeated name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cells: list[list[str]] = []
        self._numbers = array("q")
        csv.field_size_limit(_MOST_CHARACTERS)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(
                file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
            )
            line = 1
            try:
                self._header = next(reader, [])
                if len(set(self._header) - {""}) != len(self._header):
                    raise UserError(f"{path}:1: the header has an empty or repeated column name")
                while True:
                    line = reader.line_num + 1
                    cells = next(reader)
                    if len(cells) not in (0, len(self._header)):
                        raise UserError(
                            f"{path}:{line}: {len(cells)} cells, but the header has "
                            f"{len(self._header)} columns"
                        )
                    if cells:
                        self._cells.append(cells)
                        self._numbers.append(line)
            except StopIteration:
                pass
            except csv.Error as error:
                raise UserError(f"{path}:{line}: not valid CSV: {error}") from None
            except UnicodeDecodeError:
                raise UserError(
                    f"{path}:{_bad_line(path)}: not valid UTF-8; save the file as UTF-8"
                ) from None

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, index: int) -> dict[str, str]:
        return dict(zip(self._header, self._cells[index], strict=True))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


def _bad_line(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1
