"""Groups of kernels, with real kernel names and the libraries that they come from."""

import re
from pathlib import Path

import pytest

import ftbench
from ftbench.profile.work import GROUPS, group_of_kernel, group_of_operator, short

NAMES = {
    "matmul": [
        # cuBLAS on Hopper and Blackwell, on Ampere, its helpers
        "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN",
        "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN",
        "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>(...)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>(...)",
        # CUTLASS, in torch's float8 products too
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(...)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUni<",
        # Inductor's templates, bitsandbytes' product with 4-bit weights, Triton's for experts
        "triton_tem_fused_addmm_mm_3",
        "void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>(int, int, int, ...)",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x128x1",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, bf16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
        "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(...)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_5",
    ],
    "norm/elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, char*>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<...>",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "triton_poi_fused_mul_silu_4",
        "triton_poi_fused__grouped_mm_add_cat_mul_silu_silu_backward_4",
        "triton_red_fused__grouped_mm__to_copy_index_put_mul_new_zeros_sum_3",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_backward__unsafe_view_add_transpose_view_6",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
        "triton_per_fused__to_copy_add_mul_sum_11",
        "_rms_layernorm_forward", "_rms_layernorm_backward", "_rope_embedding_QK", "_fg_kernel", "_DWf_DW_dfg_kernel",
        "_rms_norm_forward_kernel", "_swiglu_backward_kernel", "_triton_rope",
        "_gemma_rms_layernorm_forward", "_approx_backward_kernel", "_adapted_swiglu_forward", "_rotary_backward",
    ],
    "quantise/dequantise": [
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*, __nv_bfloat16*, int)",
        "void kQuantizeBlockwise<float, 256, 2, 0, 0>(float*, float*, float*, unsigned char*, float*, int, int)",
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_4",
        "triton_red_fused_abs_amax_7",
        # unsloth's, bitsandbytes' and our own in Triton
        "_nf4_dequant_kernel", "weight_dequant_kernel", "dequant_4bit_kernel", "quantize_8bit_blockwise_kernel",
        "_cast_to_fp8", "_cast_layouts",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, ...",
        "void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>(...)",
        "void kOptimizer32bit2State<float, 0>(...)",
        "_adamw", "_optimizer_update_2state_8bit_blockwise_triton_kernel",
    ],
    "loss": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardGmem<4, float, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue, long>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "_chunked_cross_entropy_forward", "_cross_entropy_backward", "liger_cross_entropy_kernel",
        "triton_red_fused__log_softmax_nll_loss_forward_1",
        # the loss over chunks, compiled, which clamps its targets; unsloth's, Liger's
        "triton_red_fused__log_softmax__to_copy_clamp_exp_gather_ge_mul_scalar_tensor_where_0",
        "_fl_partial_kernel", "_fl_flash_p_kernel", "_cce_lse_forward_kernel", "_grpo_loss_fwd_kernel",
    ],
    "communication": ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
    "memory copy": ["Memcpy DtoH (Device -> Pinned)", "Memset (Device)", "Memcpy HtoD (Pageable -> Device)"],
    "other": ["void somebody::new_thing<3>(int)"],
}  # fmt: skip


@pytest.mark.parametrize("group", NAMES)
def test_kernel_names_determine_groups(group):
    assert {name: group_of_kernel(name) for name in NAMES[group]} == dict.fromkeys(NAMES[group], group)


def test_own_kernels_have_a_group():
    folder = Path(ftbench.__file__).parent / "kernels"
    launched = {
        name for path in folder.glob("*.py") for name in re.findall(r"^ +(_\w+)\[.+\]\(", path.read_text(), re.M)
    }
    assert len(launched) > 7
    assert [name for name in launched if group_of_kernel(name) == "other"] == []
    assert group_of_kernel("_dequantise") == group_of_operator("ftbench::augmented_weight") == "quantise/dequantise"


def test_every_group_has_names():
    assert set(NAMES) == set(GROUPS)


PLAIN = NAMES["norm/elementwise"][0]


@pytest.mark.parametrize(
    ("group", "callers", "phase", "in_loss"),
    [
        ("norm/elementwise", ["aten::add"], "forward", False),
        ("norm/elementwise", ["aten::add"], "backward", False),
        ("loss", ["aten::mul"], "loss", False),
        ("loss", ["aten::mul", "MulBackward0"], "backward", True),
        ("loss", ["aten::div", "Fast_CrossEntropyLossBackward"], "backward", False),
        ("optimizer", ["aten::add_"], "optimizer", False),
        ("optimizer", ["aten::mul_"], "clip", False),
        ("attention", ["aten::copy_", "aten::scaled_dot_product_attention"], "forward", False),
        ("quantise/dequantise", ["aten::add", "bitsandbytes::dequantize_4bit"], "forward", False),
    ],
)
def test_plain_kernel_belongs_to_its_caller(group, callers, phase, in_loss):
    assert group_of_kernel(PLAIN, callers, phase, in_loss) == group


def test_caller_does_not_override_an_unambiguous_name():
    assert group_of_kernel(NAMES["matmul"][0], ["aten::mm"], "loss", True) == "matmul"


def test_ambiguous_kernel_gets_the_group_of_its_operator():
    assert group_of_kernel("void somebody::new_thing<3>(int)", ["aten::mm"], "forward") == "matmul"


@pytest.mark.parametrize(
    ("group", "name", "around", "phase"),
    [
        ("matmul", "aten::addmm", ["aten::linear"], "forward"),
        ("attention", "aten::_scaled_dot_product_flash_attention_for_cpu", [], "forward"),
        ("loss", "aten::_log_softmax", [], "forward"),
        ("norm/elementwise", "aten::mul", [], "forward"),
        ("optimizer", "aten::mul_", ["Optimizer.step#AdamW.step"], "other"),
        ("loss", "aten::exp", [], "loss"),
        ("other", "something::new", [], "forward"),
    ],
)
def test_operators_have_groups_on_a_cpu(group, name, around, phase):
    assert group_of_operator(name, around, phase) == group


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (PLAIN, "vectorized_elementwise_kernel (CUDAFunctor_add)"),
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN", "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)", "kDequantizeBlockwise"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        (NAMES["loss"][0], "cunn_SoftMaxForwardGmem (LogSoftMaxForwardEpilogue)"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
         "fmha_cutlassF_bf16_aligned_64x128_rf_sm80"),
        ("aten::mm", "aten::mm"),
    ],
)  # fmt: skip
def test_short_names_are_distinct(name, said):
    assert short(name) == said


def test_every_name_has_a_short_name():
    assert all(len(short(name)) <= 80 for name in ("", "<<<>>>", "x" * 5000, "a(b", "void "))
