"""The SQLite helper: transactions, translated errors, and waiting for another process's lock."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from afield.errors import DamagedFile, Unavailable, UsageError
from afield.utils.sqlite import (
    Database,
    DatabaseBusy,
    connect,
    connect_read_only,
    retry_while_busy,
    transaction,
)
from support.virtual_time import run

SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY);"


def database(path: Path, **options: object) -> Database:
    return Database(path, SCHEMA, name="the test file", remedy="free it", **options)  # type: ignore[arg-type]


def test_transaction_that_raises_writes_nothing(tmp_path: Path) -> None:
    with database(tmp_path / "a.sqlite") as db:
        with pytest.raises(ValueError, match="stop"), db.transaction():
            db.execute("INSERT INTO numbers VALUES (?)", 1)
            raise ValueError("stop")
        assert db.fetch_all("SELECT n FROM numbers") == []
        with db.transaction():
            db.execute_many("INSERT INTO numbers VALUES (?)", [(1,), (2,)])
        assert db.fetch_one("SELECT count(*) FROM numbers") == (2,)


def test_file_is_private_and_uses_write_ahead_logging(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.sqlite"
    with database(path) as db:
        assert db.fetch_one("PRAGMA journal_mode") == ("wal",)
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_reader_changes_neither_content_nor_mode_nor_journal(tmp_path: Path) -> None:
    path = tmp_path / "100%?.sqlite"
    with closing(connect(path, SCHEMA, journal="TRUNCATE")) as own:
        own.execute("INSERT INTO numbers VALUES (1)")
    path.chmod(0o644)
    with closing(connect_read_only(path)) as reader:
        assert reader.execute("SELECT n FROM numbers").fetchall() == [(1,)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("INSERT INTO numbers VALUES (2)")
    assert path.stat().st_mode & 0o777 == 0o644
    with closing(connect(path, journal=None)) as own:
        assert own.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_reader_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError), closing(connect_read_only(tmp_path / "a.sqlite")):
        pass
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_opened_is_a_usage_error_with_path_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").mkdir()
    with pytest.raises(UsageError, match=r"cannot use the test file .*a\.sqlite: .*; free it"):
        database(tmp_path / "a.sqlite").open()


def test_failed_statement_raises_the_error_of_the_store(tmp_path: Path) -> None:
    with database(tmp_path / "a.sqlite") as db, pytest.raises(Unavailable, match="no such table"):
        db.fetch_one("SELECT 1 FROM missing")
    with database(tmp_path / "a.sqlite", error=UsageError) as db, pytest.raises(UsageError):
        db.fetch_one("SELECT 1 FROM missing")


def test_defects_of_the_caller_are_not_translated(tmp_path: Path) -> None:
    with database(tmp_path / "a.sqlite") as db:
        db.execute("INSERT INTO numbers VALUES (1)")
        with pytest.raises(sqlite3.IntegrityError):
            db.execute("INSERT INTO numbers VALUES (1)")


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(DamagedFile, match=r"a\.sqlite: it is damaged"):
        database(tmp_path / "a.sqlite").open()


def test_busy_file_is_retried_until_the_lock_is_free(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "a.sqlite"
        tries = 0
        with database(path, busy_timeout_s=0) as db:
            other = connect(path)
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(DatabaseBusy):
                await retry_while_busy(lambda: db.execute("INSERT INTO numbers VALUES (1)"), timeout_s=0.01)

            def insert() -> int:
                nonlocal tries
                tries += 1
                if tries == 3:
                    other.execute("COMMIT")
                return db.execute("INSERT INTO numbers VALUES (1)")

            assert await retry_while_busy(insert) == 1
            assert tries == 3
            with transaction(other):
                other.execute("INSERT INTO numbers VALUES (2)")
            other.close()
            assert db.fetch_one("SELECT count(*) FROM numbers") == (2,)

    run(main())
