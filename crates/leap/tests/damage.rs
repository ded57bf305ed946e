//! Files that were cut or changed: refused by name, or still what they were; never a panic, never another object.

mod common;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;

use common::{Directory, correlated, normal, rng};
use leap::noise::Noise;
use leap::online::{Label, OnlineOptions, OnlineReadout};
use leap::prompt::PromptFeatures;
use leap::readout::{Kind, Meta, Readout};
use leap::ridge::{FitOptions, fit};
use leap::rls::{Anchor, Precision, Rls};
use leap::rows::{Row, Rows};
use leap::{Error, Result};
use ndarray::Array2;

const D: usize = 3;

fn features(n: usize) -> Array2<f32> {
    normal(&mut rng(1), n, D).mapv(|v| v as f32)
}

fn fitted() -> (Readout, Anchor) {
    let lengths: Vec<f64> = (0..40).map(|i| f64::from(20 + 7 * (i % 11))).collect();
    let mut meta = Meta::new(Kind::State);
    meta.extra = BTreeMap::from([("sampling".into(), "greedy".into()), ("rls_of".into(), "the user".into())]);
    let options = FitOptions { lam: Some(3.0), ..FitOptions::new(512, meta) };
    fit(&Rows::F32(features(40).view()), &lengths, &options).unwrap()
}

fn learn(mut online: OnlineReadout, n: usize) -> OnlineReadout {
    let x = features(n);
    for (i, x) in x.rows().into_iter().enumerate() {
        let row = Row::F32(x.to_slice().unwrap());
        online.estimate(row).unwrap();
        let label = if i % 3 == 0 { Label::Censored(40) } else { Label::Exact(10 + 5 * i as u32) };
        online.observe(row, label).unwrap();
    }
    online
}

/// Every byte with its lowest, its highest and all of its bits turned, and every length: `load` refuses, or gives an
/// object that `write` turns into the bytes that were there.
fn survives_damage<T>(
    name: &str,
    save: impl Fn(&T, &Path) -> Result<()>,
    load: impl Fn(&Path) -> Result<T>,
    object: &T,
) {
    let dir = Directory::new(&format!("damage-{name}"));
    let (path, again) = (dir.0.join("file"), dir.0.join("again"));
    save(object, &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    save(&load(&path).unwrap(), &again).unwrap();
    assert!(std::fs::read(&again).unwrap() == whole);
    let check = |bytes: &[u8], what: &dyn Debug| {
        // Not over the old file: it may be mapped.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        match load(&path) {
            Ok(loaded) => {
                save(&loaded, &again).unwrap();
                assert!(std::fs::read(&again).unwrap() == whole, "{name}: {what:?} gave another object");
            }
            Err(error) => {
                assert!(matches!(error, Error::Readout(_)), "{name}: {what:?}: {error:?}");
                assert!(error.to_string().contains(path.to_str().unwrap()), "{name}: {what:?}: {error}");
            }
        }
    };
    for i in 0..whole.len() {
        for mask in [1, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[i] ^= mask;
            check(&bytes, &(i, mask));
        }
    }
    for end in 0..whole.len() {
        check(&whole[..end], &("cut", end));
    }
    let mut longer = whole.clone();
    longer.push(0);
    check(&longer, &"one byte more");
}

#[test]
fn readouts() {
    let (readout, _) = fitted();
    assert!(readout.noise().is_some());
    survives_damage("readout", Readout::save, Readout::load, &readout);
}

#[test]
fn anchors() {
    survives_damage("anchor", Anchor::save, Anchor::load, &fitted().1);
}

#[test]
fn least_squares() {
    let mut r = rng(2);
    let u = correlated(&mut r, 30, D);
    for precision in [Precision::F32, Precision::F64] {
        let mut rls = Rls::with_diagonal(&[0.5; D + 1], &[0.1; D + 1], 0.99, precision).unwrap();
        rls.update(&u.view(), &[3.0; 30]).unwrap();
        survives_damage(&format!("rls-{precision:?}"), Rls::save, Rls::load, &rls);
    }
}

#[test]
fn online_states() {
    let warming = OnlineReadout::from_zero(D, 512, 3.0, 30, Kind::Prompt, OnlineOptions::default()).unwrap();
    survives_damage("warming", OnlineReadout::save, OnlineReadout::load, &learn(warming, 5));
    let (readout, anchor) = fitted();
    let ready = OnlineReadout::new(readout, Some(anchor), OnlineOptions::default()).unwrap();
    survives_damage("ready", OnlineReadout::save, OnlineReadout::load, &learn(ready, 11));
}

#[test]
fn prompt_tables() {
    let made = PromptFeatures::new(&Rows::F32(features(5).view()), 4, 7).unwrap();
    survives_damage("prompt", PromptFeatures::save, PromptFeatures::load, &made);
}

#[test]
fn a_resumed_readout_keeps_its_own_metadata_and_gets_no_other() {
    let dir = Directory::new("extra");
    let (readout, anchor) = fitted();
    let online = learn(OnlineReadout::new(readout, Some(anchor), OnlineOptions::default()).unwrap(), 11);
    let path = dir.0.join("online");
    online.save(&path).unwrap();
    let resumed = OnlineReadout::load(&path).unwrap();
    assert_eq!(resumed.readout().unwrap(), online.readout().unwrap());
    assert_eq!(resumed.readout().unwrap().meta().extra.len(), 2);
}

/// Metadata of a safetensors file changed by `change`, without the checksum: what another program could write.
fn rewritten(path: &Path, change: impl Fn(&mut serde_json::Map<String, serde_json::Value>)) {
    let bytes = std::fs::read(path).unwrap();
    let end = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    let metadata = header["__metadata__"].as_object_mut().unwrap();
    metadata.remove("leap_checksum").unwrap();
    change(metadata);
    let header = header.to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[end..]);
    std::fs::write(path, out).unwrap();
}

#[test]
fn states_that_are_not_of_one_piece_are_refused() {
    let dir = Directory::new("pieces");
    let (good, bad) = (dir.0.join("good"), dir.0.join("bad"));
    let noise = serde_json::to_string(&Noise::new(511)).unwrap();
    let refused = |online: &OnlineReadout, changes: &[(&str, &str, &str)]| {
        online.save(&good).unwrap();
        std::fs::copy(&good, &bad).unwrap();
        rewritten(&bad, |_| ());
        assert!(OnlineReadout::load(&bad).is_ok());
        for (key, from, to) in changes {
            std::fs::copy(&good, &bad).unwrap();
            rewritten(&bad, |metadata| {
                let text = metadata[*key].as_str().unwrap();
                let changed = if from.is_empty() { (*to).to_owned() } else { text.replacen(from, to, 1) };
                assert_ne!(text, changed, "{key}");
                metadata.insert((*key).into(), changed.into());
            });
            let error = OnlineReadout::load(&bad).unwrap_err();
            assert!(matches!(error, Error::Readout(_)) && error.to_string().contains("bad"), "{key} {to}: {error}");
        }
    };
    let common = [
        ("online", "\"d\":3", "\"d\":18446744073709551615"),
        ("online", "\"d\":3", "\"d\":0"),
        ("online", "\"max_tokens\":512", "\"max_tokens\":0"),
        ("online", "\"max_tokens\":512", "\"max_tokens\":100"),
        ("online", "\"batch\":8", "\"batch\":0"),
        ("online", "\"forgetting\":1.0", "\"forgetting\":0.0"),
        ("online_noise", "", noise.as_str()),
        ("online_waiting", "", "18446744073709551615"),
    ];
    let warming = OnlineReadout::from_zero(D, 512, 3.0, 30, Kind::Prompt, OnlineOptions::default()).unwrap();
    let warming = learn(warming, 5);
    refused(&warming, &common);
    refused(
        &warming,
        &[
            ("online", "\"lam\":3.0", "\"lam\":-3.0"),
            ("online_warmup_limit", "", "1"),
            ("online_warmup_rows", "", "30"),
            ("online", "\"known\":false", "\"known\":true"),
        ],
    );
    let (readout, anchor) = fitted();
    let ready = learn(OnlineReadout::new(readout, Some(anchor), OnlineOptions::default()).unwrap(), 11);
    refused(&ready, &common);
    refused(
        &ready,
        &[
            ("online", "\"lam\":3.0", "\"lam\":4.0"),
            ("online", "\"double\":false", "\"double\":true"),
            ("rls_parameters", "", "1099511627776"),
            ("rls_pending_rows", "", "1099511627776"),
            ("noise", "\"max_tokens\":512", "\"max_tokens\":511"),
        ],
    );
}

#[test]
fn a_failed_save_leaves_nothing_behind() {
    let dir = Directory::new("failed");
    // A directory in the file's place makes the last step, the rename, fail.
    let path = dir.0.join("taken");
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(fitted().0.save(&path), Err(Error::Io { .. })));
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1);
    assert!(matches!(fitted().0.save(Path::new("/")), Err(Error::Io { .. })));
}

#[test]
fn mapped_tables_may_lie_beside_other_tensors() {
    let dir = Directory::new("beside");
    let path = dir.0.join("table");
    let made = PromptFeatures::new(&Rows::F32(features(5).view()), 4, 7).unwrap();
    made.save(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let end = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    header["__metadata__"].as_object_mut().unwrap().remove("leap_checksum");
    let n = bytes.len() - end;
    header["z"] = serde_json::json!({"dtype": "U8", "shape": [6], "data_offsets": [n, n + 6]});
    let header = header.to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[end..]);
    out.extend([255; 6]);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, out).unwrap();
    assert_eq!(PromptFeatures::load(&path).unwrap().pool(&[4, 0]).unwrap(), made.pool(&[4, 0]).unwrap());
}
