"""The variables of a node that engines inherit."""

from __future__ import annotations

import pytest

from shared.environment import find_referenced, is_credential, without_credentials


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AZURE_STORAGE_ACCOUNT",
        "OPENAI_API_KEY",
        "WANDB_API_KEY",
        "PGPASSWORD",
        "THAW_ADMIN_KEY",
        "THAW_API_KEYS",
        "THAW_SECRETS_DIR",
        "THAW_DATABASE_URL",
        "github_token",
        "SSH_AUTH_SOCK",
    ],
)
def test_credentials_are_recognized_by_variable_name(name: str) -> None:
    assert is_credential(name, "x")


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "PWD",
        "LD_LIBRARY_PATH",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "TOKENIZERS_PARALLELISM",
        "HF_HOME",
        "HF_ENDPOINT",
        "VLLM_CPU_KVCACHE_SPACE",
        "THAW_VLLM_PYTHON",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "KEYBOARD",
        "XAUTHORS",
    ],
)
def test_other_variables_are_inherited(name: str) -> None:
    assert not is_credential(name, "x")


def test_url_with_a_password_is_a_credential_under_any_name() -> None:
    assert is_credential("HTTPS_PROXY", "http://me:secret@proxy:3128")
    assert not is_credential("HTTPS_PROXY", "http://proxy:3128/a:b@c")


def test_credentials_referenced_by_the_model_are_passed() -> None:
    asked = find_referenced({"HF_TOKEN": "${HF_TOKEN}", "BOTH": "${ONE}-${THAW_ADMIN_KEY}"})
    assert asked == {"HF_TOKEN", "ONE"}, "Thaw's own are never given away"
    assert without_credentials({"HF_TOKEN": "x", "AWS_PROFILE": "y", "PATH": "z"}, asked) == {"HF_TOKEN": "x", "PATH": "z"}
