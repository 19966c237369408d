"""Files of a model that are mounted into its container."""

from __future__ import annotations

from pathlib import Path

from services.enginehost.runtimes.model_mounts import model_mounts


def binds_of(*paths: Path) -> list[str]:
    return [f"{path}:{path}:ro" for path in paths]


def test_all_shards_of_a_gguf_model_are_mounted(tmp_path: Path) -> None:
    shards = [tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in (*shards, tmp_path / "other-00001-of-00003.gguf"):
        path.touch()
    assert model_mounts(shards[0]) == binds_of(*shards)
    assert model_mounts(shards[1]) == binds_of(shards[1], shards[0], shards[2])


def test_a_file_that_the_operator_mounts_is_mounted_once(tmp_path: Path) -> None:
    first, second = shards = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for path in shards:
        path.touch()
    assert model_mounts(first, ["/data:/data:ro", f"{second}:{second}:ro"]) == binds_of(first)


def test_a_shard_that_is_missing_is_not_created_by_a_mount(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    first.touch()
    assert model_mounts(first) == binds_of(first)


def test_blobs_of_a_snapshot_in_the_hubs_cache_are_mounted(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "rev", tmp_path / "blobs"
    for directory in (snapshot / "sub", blobs):
        directory.mkdir(parents=True)
    for name in ("a", "b", "unused"):
        (blobs / name).touch()
    (snapshot / "config.json").symlink_to("../../blobs/a")
    (snapshot / "sub" / "weights.safetensors").symlink_to(blobs / "b")
    (snapshot / "same.json").symlink_to("../../blobs/a")
    (snapshot / "dangling").symlink_to("../../blobs/none")
    assert model_mounts(snapshot) == binds_of(snapshot, blobs / "a", blobs / "b")


def test_links_of_a_model_mount_no_other_files_of_the_host(tmp_path: Path) -> None:
    snapshot, blobs, secret = tmp_path / "snapshots" / "rev", tmp_path / "blobs", tmp_path / "secret"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    secret.touch()
    (blobs / "a").symlink_to(secret)
    (snapshot / "config.json").symlink_to(secret)
    (snapshot / "weights.safetensors").symlink_to("../../blobs/a")
    (snapshot / "host").symlink_to("/")
    assert model_mounts(snapshot) == binds_of(snapshot)
