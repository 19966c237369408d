"""List the model types and classes that the builtin engine's transformers builds.

The lists make it unnecessary to import transformers; tests/contract/test_loader_defaults.py
compares them with the installed version.
"""

from __future__ import annotations

from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelSpec
from shared.errors import UnsupportedArchitecture

_CAUSAL_TYPES = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird bigbird_pegasus
biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2 cohere2_moe cohere_compass_text
cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note
dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo
flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified
gemma4_unified_assistant gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3
llama llama4 llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi
moss_transcribe_diarize mpt musicgen musicgen_melody mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer
rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr
vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya
"""
CAUSAL_TYPES = frozenset(_CAUSAL_TYPES.split())
"""Model types that AutoModelForCausalLM builds."""

_CAUSAL_CLASSES = """
AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
BailingHybridForCausalLM BambaForCausalLM BartForCausalLM BeamForCausalLM BertGenerationDecoder BertLMHeadModel
BigBirdForCausalLM BigBirdPegasusForCausalLM BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM
BlenderbotSmallForCausalLM BloomForCausalLM BltForCausalLM CTRLLMHeadModel CamembertForCausalLM CodeGenForCausalLM
Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM CohereForCausalLM CpmAntForCausalLM CwmForCausalLM
Data2VecTextForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM ElectraForCausalLM
Emu3ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM
FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM
GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM
Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration
Gemma4AssistantForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedAssistantForCausalLM
Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GitForCausalLM Glm4ForCausalLM
Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration
GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM HeliumForCausalLM HrmTextForCausalLM
HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Inkling2ForCausalLM InklingForCausalLM
Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM KimiLinearForCausalLM Kolibri1ForCausalLM LagunaForCausalLM
Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM
MBartForCausalLM Mamba2ForCausalLM MambaForCausalLM MarianForCausalLM MegatronBertForCausalLM MellumForCausalLM
MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM MllamaForCausalLM
ModernBertDecoderForCausalLM MoshiForCausalLM MossTranscribeDiarizeForConditionalGeneration MptForCausalLM
MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM NanoChatForCausalLM NemotronForCausalLM
NemotronHForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM
OlmoeForCausalLM OpenAIGPTLMHeadModel PLBartForCausalLM PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM
Phi4MultimodalForCausalLM PhiForCausalLM PhimoeForCausalLM ProphetNetForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM
RecurrentGemmaForCausalLM ReformerModelWithLMHead RemBertForCausalLM RoCBertForCausalLM RoFormerForCausalLM
RobertaForCausalLM RobertaPreLayerNormForCausalLM RwkvForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM
WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM XLMWithLMHeadModel XLNetLMHeadModel
XmodForCausalLM YoutuForCausalLM Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM xLSTMForCausalLM
"""
CAUSAL_CLASSES = frozenset(_CAUSAL_CLASSES.split())
"""The classes that it builds them with."""

_ENCODER_TYPES = """
afmoe aimv2 aimv2_vision_model albert align altclip apertus arcee aria aria_text audio-spectrogram-transformer
audioflamingo3 audioflamingo3_encoder autoformer axk1 axk2 aya_vision bailing_hybrid bamba bark bart beam beit bert
bert-generation big_bird bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small blip blip-2 blip_2_qformer
bloom blt bridgetower bros camembert canary canine chameleon chinese_clip chinese_clip_vision_model clap clip
clip_text_model clip_vision_model clipseg clvp codegen cohere cohere2 cohere2_moe cohere2_vision cohere_asr
cohere_compass cohere_compass_text cohere_compass_vision conditional_detr convbert convnext convnextv2 cosmos3_edge
cosmos3_edge_text cosmos3_edge_vision cosmos3_omni cpmant csm ctrl cvt cwm d_fine dab-detr dac data2vec-audio
data2vec-text data2vec-vision dbrx deberta deberta-v2 decision_transformer deepseek_ocr2 deepseek_v2 deepseek_v3
deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid deformable_detr deimv2 deit depth_pro detr dia diffllama
diffusion_gemma dinat dinov2 dinov2_with_registers dinov3_convnext dinov3_vit distilbert doge donut-swin dots1
dots3_note dots3_note_text dpr dpt edgetam edgetam_video edgetam_vision_model efficientloftr efficientnet electra
embedding_gemma2 embedding_gemma2_text emu3 encodec ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe esm esmc eurobert
evolla exaone4 exaone4_5 exaone4_5_vision exaone_moe falcon falcon_h1 falcon_mamba fast_vlm fastspeech2_conformer
fastspeech2_conformer_with_hifigan flaubert flava flex_olmo flint florence2 fnet focalnet fsmt fun_asr_nano
fun_asr_nano_encoder funnel fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_audio gemma3n_text gemma3n_vision
gemma4 gemma4_audio gemma4_text gemma4_unified gemma4_unified_text gemma4_vision git glm glm4 glm46v glm4_moe
glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_moe_vision glm4v_text glm4v_vision glm5_next glm5_next_text
glm5_next_vision glm_image glm_image_text glm_image_vision glm_image_vqmodel glm_moe_dsa glm_ocr glm_ocr_text
glm_ocr_vision glmasr glmasr_encoder glmga glpn got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
gpt_oss gptj gradium_phonon_tts granite granite4_vision granite_docling granite_docling_text granite_docling_vision
granite_speech granite_speech5_ctc granite_speech5_encoder granite_speech_plus granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared grounding-dino groupvit gte helium hgnet_v2 hiera higgs_audio_v2
higgs_audio_v2_tokenizer hrm_text hubert hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text hunyuan_vl_vision
hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 ibert idefics idefics2 idefics3 idefics3_vision ijepa imagegpt informer
inkling2 inkling2_text inkling2_vision inkling_mm_model inkling_text instructblip instructblipvideo internlm3 internvl
internvl_vision iquestcoder jais2 jamba janus jetmoe jina_embeddings_v3 kimi_k25 kimi_k25_vision kimi_linear kolibri1
kosmos-2 kosmos-2.5 kyutai_speech_to_text laguna lasr_ctc lasr_encoder layoutlm layoutlmv2 layoutlmv3 led levit lfm2
lfm2_moe lfm2_vl lfm3 lfm3_vl lfm3_vl_vision lightglue lighton_ocr lilt llama llama4 llama4_text llava llava_next
llava_next_video llava_onevision longcat_flash longformer longt5 luke lw_detr lxmert m2m_100 mamba mamba2 marian
markuplm mask2former maskformer maskformer-swin mbart megatron-bert mellum metaclip_2 mgp-str mimi mimi_decoder
mimi_encoder mimo_v2_flash minicpm3 minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_7 minicpmv4_7_vision minimax
minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3 mistral4 mistral_large4
mistral_large4_text mixtral mlcd mlcd_vision_model mllama mm-grounding-dino mobilebert mobilenet_v1 mobilenet_v2
mobilevit mobilevitv2 modernbert modernbert-decoder modernvbert molmo2 molmo2_text moonshine moonshine_streaming moshi
moss_transcribe_diarize moss_transcribe_diarize_audio mpnet mpt mra mt5 muse_glimmer muse_glimmer_assistant
muse_glimmer_text muse_glimmer_vision muse_spark muse_spark_audio muse_spark_text muse_spark_vision musicflamingo
musicgen musicgen_melody mvp nanochat nemo_speechlm nemotron nemotron3_5_asr nemotron3_5_transcribe_asr_audio
nemotron3_5_transcribe_audio nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio
nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h neomme neucodec nllb-moe nomic_bert nystromformer
olmo olmo2 olmo3 olmo_hybrid olmoe omdet-turbo oneformer openai-gpt openai_privacy_filter opt ovis2 owlv2 owlvit
paddleocr_vl paligemma parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt patchtsmixer patchtst pe_audio
pe_audio_encoder pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder pegasus pegasus_x perceiver
perception_lm persimmon phi phi3 phi4_multimodal phimoe pi0 pixio pixtral plbart pocket_tts pocket_tts_audio_tokenizer
pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder poolformer pp_doclayout_v3 pp_doclayout_v4
pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec
prophetnet pvt pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2 qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text
qwen2_5_vl_vision qwen2_audio qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_asr qwen3_asr_encoder qwen3_moe qwen3_next
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision
qwen4_exp qwen4_exp_text qwen4_exp_vision radio recurrent_gemma reformer regnet rembert resnet rf_detr roberta
roberta-prelayernorm roc_bert roformer rt_detr rt_detr_v2 rwkv sam sam2 sam2_hiera_det_model sam2_video
sam2_vision_model sam3 sam3_lite_text sam3_lite_text_text_model sam3_tracker sam3_tracker_video sam3_video
sam3_vision_model sam3_vit_model sam_hq sam_hq_vision_model sam_vision_model sapiens2 seamless_m4t seamless_m4t_v2
seed_oss segformer seggpt sew sew-d siglip siglip2 siglip2_vision_model siglip_vision_model smollm3 smolvlm
smolvlm_vision solar_open speech_to_text speecht5 splinter squeezebert stablelm starcoder2 step3p7 swiftformer swin
swin2sr swinv2 switch_transformers t5 t5gemma t5gemma2 t5gemma2_encoder table-transformer tapas textnet
time_series_transformer timesfm timesfm2_5 timesformer timm_backbone timm_wrapper tipsv2 tipsv2_text_model
tipsv2_vision_model tvp udop ultrabert ultravbert umt5 unispeech unispeech-sat univnet unlimited_ocr uvdoc vaultgemma
vibevoice vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
vibevoice_asr video_llama_3 video_llama_3_vision video_llava videomae videoprism videoprism_vision_model vilt vipllava
vision-text-dual-encoder visual_bert vit vit_mae vit_msn vitdet vits vivit vjepa2 voxtral voxtral_encoder
voxtral_realtime voxtral_realtime_encoder voxtral_realtime_text wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm
whisper xclip xcodec xcodec2 xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yolos yoso youtu zamba zamba2 zaya
"""
ENCODER_TYPES = frozenset(_ENCODER_TYPES.split())
"""Model types that AutoModel builds."""

_CAUSAL_CLASSES_LOWER = frozenset(name.lower() for name in CAUSAL_CLASSES)


def check_known(spec: ModelSpec, info: ModelInfo) -> None:
    """Refuse a model that the builtin engine could not build at its first request.

    Class names are compared without case: older files say LLaMAForCausalLM. A model whose own code
    is trusted is not checked, nor is one of another engine.

    Raises:
        UnsupportedArchitecture: transformers knows neither the model type nor the class.
    """
    if spec.engine != "builtin" or spec.trust_remote_code or info.adapter is not None:
        return
    if info.task == "generate":
        known = info.model_type in CAUSAL_TYPES and info.architecture.lower() in _CAUSAL_CLASSES_LOWER
    else:
        known = info.model_type in ENCODER_TYPES
    if not known:
        raise UnsupportedArchitecture(
            f"{info.architecture} (model type {info.model_type!r}) is not an architecture that the builtin engine can build. "
            "Name an engine that serves it (--engine vllm), or set trust_remote_code if the model brings its own code"
        )
