//! Prompt features against the projection written out.

mod common;

use common::{normal, rng};
use half::{bf16, f16};
use leap::prompt::{PromptFeatures, length_features};
use leap::rows::{Row, Rows};
use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn signs(d: usize, dim: usize, seed: u64) -> Array2<f64> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut stream = ChaCha8Rng::from_seed(key);
    let mut out = Array2::zeros((d, dim));
    for i in 0..d {
        let words: Vec<u32> = (0..dim.div_ceil(32)).map(|_| stream.next_u32()).collect();
        for j in 0..dim {
            out[(i, j)] = if words[j / 32] & (1 << (j % 32)) != 0 { 1.0 } else { -1.0 };
        }
    }
    out
}

#[test]
fn pooling_is_the_projected_mean() {
    let (vocabulary, d, dim) = (1300, 50, 40);
    let e = normal(&mut rng(1), vocabulary, d).mapv(|v| v as f32);
    let features = PromptFeatures::new(&Rows::F32(e.view()), dim, 7).unwrap();
    assert_eq!((features.dim(), features.width(), features.vocabulary(), features.d()), (40, 43, 1300, 50));
    let projection = signs(d, dim, 7) / (dim as f64).sqrt();
    let ids = [0u32, 1299, 513, 513, 2];
    let mean =
        ids.iter().map(|&i| e.row(i as usize).mapv(f64::from)).fold(ndarray::Array1::zeros(d), |a, r| a + r) / 5.0;
    let expected = mean.dot(&projection);
    let pooled = features.pool(&ids).unwrap();
    let projected = features.project(Row::F64(mean.as_slice().unwrap()), 5).unwrap();
    for j in 0..dim {
        // f16 has 11 bits; the values are about 1.
        assert!((f64::from(pooled[j]) - expected[j]).abs() < 4e-3, "{j}");
        assert!((f64::from(projected[j]) - expected[j]).abs() < 1e-6, "{j}");
    }
    let length = [5f64.sqrt() as f32, 6f64.ln() as f32, 5.0];
    assert_eq!(pooled[dim..], length);
    assert_eq!(projected[dim..], length);
    assert_eq!(length_features(5), length);
    let other = PromptFeatures::new(&Rows::F32(e.view()), dim, 8).unwrap();
    assert_ne!(other.pool(&ids).unwrap()[..dim], pooled[..dim]);
}

#[test]
fn distances_survive_the_projection() {
    // Two rows in 4096 dimensions; with 256 signs each the relative error of a squared distance is about sqrt(2/256).
    let e = normal(&mut rng(2), 2, 4096).mapv(|v| v as f32);
    let features = PromptFeatures::new(&Rows::F32(e.view()), 256, 0).unwrap();
    let (a, b) = (features.pool(&[0]).unwrap(), features.pool(&[1]).unwrap());
    let near: f32 = a[..256].iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
    let far: f32 = e.row(0).iter().zip(e.row(1)).map(|(a, b)| (a - b).powi(2)).sum();
    assert!((near / far - 1.0).abs() < 0.4, "{near} {far}");
}

#[test]
fn bad_prompts_and_tables_are_refused() {
    let mut e = normal(&mut rng(3), 10, 4).mapv(|v| v as f32);
    let features = PromptFeatures::new(&Rows::F32(e.view()), 8, 0).unwrap();
    let text = |r: leap::Result<Vec<f32>>| r.unwrap_err().to_string();
    assert!(text(features.pool(&[])).contains("empty"));
    assert!(text(features.pool(&[3, 10])).contains("token 1: id 10"));
    assert!(text(features.project(Row::F32(&[0.0; 4]), 0)).contains("empty"));
    assert!(text(features.project(Row::F32(&[0.0; 5]), 1)).contains("5 features"));
    assert!(text(features.project(Row::F32(&[0.0, f32::NAN, 0.0, 0.0]), 1)).contains("column 1"));
    assert!(PromptFeatures::new(&Rows::F32(e.view()), 0, 0).is_err());
    e[(6, 2)] = f32::NAN;
    let error = PromptFeatures::new(&Rows::F32(e.view()), 8, 0).unwrap_err().to_string();
    assert!(error.contains("row 6, column 2"), "{error}");
    e[(6, 2)] = 1e30;
    assert!(PromptFeatures::new(&Rows::F32(e.view()), 8, 0).unwrap_err().to_string().contains("row 6"));
    assert!(PromptFeatures::new(&Rows::F32(Array2::zeros((0, 4)).view()), 8, 0).is_err());
}

#[test]
fn files_give_the_same_features() {
    let dir = std::env::temp_dir().join(format!("leap-prompt-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let e = normal(&mut rng(4), 600, 20).mapv(bf16::from_f64);
    let made = PromptFeatures::new(&Rows::Bf16(e.view()), 33, 5).unwrap();
    let ids = [5u32, 599, 0];
    let expected = made.pool(&ids).unwrap();

    let (one, two) = (dir.join("one.safetensors"), dir.join("two.safetensors"));
    made.save(&one).unwrap();
    let mapped = PromptFeatures::load(&one).unwrap();
    assert_eq!(mapped.pool(&ids).unwrap(), expected);
    let x = vec![0.25f32; 20];
    assert_eq!(mapped.project(Row::F32(&x), 9).unwrap(), made.project(Row::F32(&x), 9).unwrap());
    mapped.save(&two).unwrap();
    assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());

    // A model's file: the embedding in each type, beside another tensor.
    let write = |dtype: &str, data: Vec<u8>| {
        let n = data.len();
        let header = serde_json::json!({
            "model.norm": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "model.embed_tokens.weight": {"dtype": dtype, "shape": [600, 20], "data_offsets": [4, 4 + n]},
        })
        .to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 4]);
        bytes.extend(data);
        std::fs::write(&two, bytes).unwrap();
        PromptFeatures::from_safetensors(&two, "model.embed_tokens.weight", 33, 5)
    };
    let brain = write("BF16", e.iter().flat_map(|v| v.to_le_bytes()).collect()).unwrap();
    assert_eq!(brain.pool(&ids).unwrap(), expected);
    let single = write("F32", e.iter().flat_map(|v| v.to_f32().to_le_bytes()).collect()).unwrap();
    assert_eq!(single.pool(&ids).unwrap(), expected);
    let half = e.mapv(|v| f16::from_f32(v.to_f32()));
    let from_half = write("F16", half.iter().flat_map(|v| v.to_le_bytes()).collect()).unwrap();
    let in_memory = PromptFeatures::new(&Rows::F16(half.view()), 33, 5).unwrap();
    assert_eq!(from_half.pool(&ids).unwrap(), in_memory.pool(&ids).unwrap());

    let text = |r: leap::Result<PromptFeatures>| r.unwrap_err().to_string();
    assert!(text(PromptFeatures::from_safetensors(&two, "lm_head", 33, 5)).contains("two.safetensors"));
    assert!(text(PromptFeatures::from_safetensors(&two, "model.norm", 33, 5)).contains("two dimensions"));
    assert!(text(write("I16", vec![0; 24_000])).contains("I16"));
    assert!(text(PromptFeatures::load(&two)).contains("leap_prompt_version"));
    let mut nan = e.clone();
    nan[(17, 3)] = bf16::NAN;
    assert!(text(write("BF16", nan.iter().flat_map(|v| v.to_le_bytes()).collect())).contains("row 17, column 3"));
    let bytes = std::fs::read(&one).unwrap();
    std::fs::write(&one, &bytes[..bytes.len() - 2]).unwrap();
    assert!(text(PromptFeatures::load(&one)).contains("one.safetensors"));
    std::fs::remove_dir_all(&dir).unwrap();
}
