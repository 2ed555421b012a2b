"""The home directory: where it is and whether it may be used (R10)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from openjobs.errors import InvalidConfiguration
from openjobs.host import config
from openjobs.host.config import find_home, network_file_system, prepare_home


class TestWhere:
    def test_an_argument_comes_first(self, tmp_path: Path) -> None:
        """What is given wins over OPENJOBS_HOME, which wins over the platform's state directory."""
        environ = {"OPENJOBS_HOME": "/from/environ"}
        assert find_home(tmp_path, environ) == tmp_path
        assert find_home(None, environ) == Path("/from/environ")

    def test_an_empty_variable_counts_as_none(self) -> None:
        assert find_home(None, {"OPENJOBS_HOME": ""}).name == "openjobs"

    def test_it_is_absolute(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A relative path and `~` are made absolute: the host works elsewhere."""
        monkeypatch.chdir(tmp_path)
        assert find_home("a/../b", {}) == tmp_path / "b"
        assert find_home("~/x", {}) == Path.home() / "x"

    @pytest.mark.parametrize("text", ["", "a\0b", "a\nb"])
    def test_what_cannot_be_a_path_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidConfiguration):
            find_home(text, {})

    def test_nothing_is_made_by_looking(self, tmp_path: Path) -> None:
        find_home(tmp_path / "home", {})
        assert not (tmp_path / "home").exists()


class TestSafety:
    def test_it_is_made_for_us_alone(self, tmp_path: Path) -> None:
        """A missing home is made with 0700, and so are its missing parents."""
        home = prepare_home(tmp_path / "a" / "home")
        assert home.stat().st_mode & 0o777 == 0o700
        assert home.parent.stat().st_mode & 0o777 == 0o700
        assert prepare_home(home) == home

    def test_an_open_home_is_closed_to_others(self, tmp_path: Path) -> None:
        """An empty directory, or one that is a home already, loses its permissions for others."""
        for names in ([], ["sessions", "notes"]):
            home = tmp_path / f"home{len(names)}"
            home.mkdir(mode=0o755)
            for name in names:
                (home / name).mkdir()
            prepare_home(home)
            assert home.stat().st_mode & 0o777 == 0o700

    def test_somebodys_directory_is_left_alone(self, tmp_path: Path) -> None:
        """A directory with other things that others may read is no home, and keeps its permissions."""
        (tmp_path / "project").mkdir(mode=0o755)
        (tmp_path / "project" / "main.c").touch()
        with pytest.raises(InvalidConfiguration, match="holds other things"):
            prepare_home(tmp_path / "project")
        assert (tmp_path / "project").stat().st_mode & 0o777 == 0o755

    def test_another_users_home_is_refused(self, tmp_path: Path) -> None:
        """A home that belongs to another user is refused, with both users named."""
        home = prepare_home(tmp_path / "home")
        other = os.geteuid() + 1
        with pytest.raises(InvalidConfiguration, match=f"belongs to user {os.geteuid()}, not to us \\({other}\\)"):
            prepare_home(home, uid=other)

    def test_a_file_in_its_place_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "home").touch()
        with pytest.raises(InvalidConfiguration, match="cannot be used"):
            prepare_home(tmp_path / "home")
        with pytest.raises(InvalidConfiguration, match="cannot be used"):
            prepare_home(tmp_path / "home" / "below")

    def test_our_own_link_is_followed(self, tmp_path: Path) -> None:
        """A home that we put elsewhere with a link is used where it really is, a new one too."""
        (tmp_path / "link").symlink_to("real/home")
        (tmp_path / "real").mkdir()
        assert prepare_home(tmp_path / "link") == tmp_path.resolve() / "real" / "home"
        assert (tmp_path / "real" / "home").is_dir()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link that belongs to another user")
    def test_another_users_link_is_refused(self, tmp_path: Path) -> None:
        """A link that another user made never leads us anywhere."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
        for path in (tmp_path / "link", tmp_path / "link" / "home"):
            with pytest.raises(InvalidConfiguration, match="a link that user 12345 made"):
                prepare_home(path)
        assert not (tmp_path / "real" / "home").exists()

    def test_a_way_that_anybody_can_change_is_refused(self, tmp_path: Path) -> None:
        """A directory that every user may write to, without the sticky bit, cannot hold a home."""
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(InvalidConfiguration, match="every user may rename"):
            prepare_home(tmp_path / "open" / "home")
        (tmp_path / "open").chmod(0o1777)
        prepare_home(tmp_path / "open" / "home")

    def test_a_circle_of_links_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(InvalidConfiguration, match="circles"):
            prepare_home(tmp_path / "a")


MOUNTS = """\
1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
2 1 0:40 / /home/me rw shared:2 master:1 - nfs4 server:/export rw
3 2 8:2 / /home/me/local rw - xfs /dev/sdb rw
4 1 0:41 / /mnt/with\\040space rw - fuse.sshfs host: rw
5 1 0:42 / /again rw - nfs server:/x rw
6 5 8:3 / /again rw - ext4 /dev/sdc rw
rubbish
"""


class TestNetworkFileSystems:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/home/other", None),
            ("/home/me/.local/state", "nfs4"),
            ("/home/me", "nfs4"),
            ("/home/me/local/x", None),
            ("/home/mean", None),
            ("/mnt/with space/x", "fuse.sshfs"),
            ("/again", None),
        ],
    )
    def test_the_nearest_mount_counts(self, path: str, kind: str | None) -> None:
        """The type is that of the mount that really holds the path, a later one over an earlier one."""
        assert network_file_system(Path(path), MOUNTS) == kind

    def test_it_is_warned_about_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A home on a network file system is used, with one warning a process."""
        monkeypatch.setattr(config, "network_file_system", lambda path: "nfs4")
        with caplog.at_level(logging.WARNING):
            prepare_home(tmp_path / "home")
            prepare_home(tmp_path / "home")
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "is on a network file system (nfs4): locks and durability are not promised" in warnings[0]
