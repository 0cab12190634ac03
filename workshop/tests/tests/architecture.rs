//! docs/ARCHITECTURE.md shows where one page goes, on the plain path and with sharing and storage:
//! its files and functions exist, and all other paths that it names. So do those that
//! docs/PAPERS.md names, and the tests that docs/THREAT_MODEL.md names. All files of tests are run,
//! the engine names no manager, and the product does not depend on the workshop.

use std::fs;

use lab::setup::repository;
use marks::runs;

/// A file that `main.rs` doesn't name would not even be compiled.
#[runs(promised)]
#[test]
fn every_file_here_is_part_of_this_program() {
    let dir = repository().join("workshop/tests/tests");
    let main = fs::read_to_string(dir.join("main.rs")).unwrap();
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "rs")) {
        let name = file.file_stem().unwrap().to_str().unwrap();
        let is_named = main.lines().any(|line| line == format!("mod {name};"));
        assert!(is_named || name == "main", "main.rs does not name {name}");
    }
}

/// What is special to one is in `crates/managers`, behind a trait. Comments may say whose streams
/// are described.
#[runs(promised)]
#[test]
fn the_engine_names_no_manager() {
    let mut files = vec![repository().join("crates/engine")];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = fs::read_to_string(&path).unwrap().to_lowercase();
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            let named =
                ["libvirt", "kubevirt", "proxmox"].into_iter().find(|it| line.contains(*it));
            assert_eq!(named, None, "{}: {line}", path.display());
        }
    }
}

/// Crates of the product do without the workshop, in their tests too.
#[runs(promised)]
#[test]
fn the_product_does_not_depend_on_the_workshop() {
    let workspace = fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let lines = workspace.lines().filter(|line| line.contains("path = \"workshop/"));
    let tools: Vec<&str> = lines.filter_map(|line| Some(line.split_once(" = ")?.0)).collect();
    assert!(tools.contains(&"lab"), "{tools:?}");
    for folder in fs::read_dir(repository().join("crates")).unwrap() {
        let manifest = folder.unwrap().path().join("Cargo.toml");
        for line in fs::read_to_string(&manifest).unwrap().lines() {
            let name = line.split(['.', ' ']).next().unwrap_or_default();
            let is_tool = tools.contains(&name) || line.contains("../workshop/");
            assert!(!is_tool, "{}: {line}", manifest.display());
        }
    }
}

#[runs(promised)]
#[test]
fn every_step_of_a_page_is_there() {
    let root = repository();
    let text = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    let way = text.split_once("## Where one page goes").expect("the chapter").1;
    let way = way.split("\n## ").next().expect("what comes before the next chapter");
    let blocks: Vec<&str> = way.split("```").skip(1).step_by(2).collect();
    assert_eq!(blocks.len(), 2, "the plain path, and what sharing and storage add");
    let mut steps = 0;
    for line in blocks.iter().flat_map(|block| block.lines()) {
        let mut words = line.split_whitespace().skip_while(|word| !word.ends_with(".rs"));
        let (Some(file), Some(function)) = (words.next(), words.next()) else {
            assert!(line.trim().is_empty(), "neither file nor function: {line}");
            continue;
        };
        let code = fs::read_to_string(root.join(file))
            .unwrap_or_else(|error| panic!("{file} ({line}): {error}"));
        let defined = [format!("fn {function}("), format!("fn {function}<")];
        assert!(defined.iter().any(|text| code.contains(text)), "{file} has no fn {function}");
        steps += 1;
    }
    assert!(steps >= 16, "{steps} steps");
}

/// The papers' tables name files below `crates/`.
#[runs(promised)]
#[test]
fn every_file_that_the_papers_tables_name_is_there() {
    let root = repository();
    let text = fs::read_to_string(root.join("docs/PAPERS.md")).unwrap();
    let names = text.split('`').skip(1).step_by(2);
    let files: Vec<_> =
        names.filter(|name| name.contains("/src/") && name.ends_with(".rs")).collect();
    assert!(files.len() > 60, "{files:?}");
    for file in files {
        assert!(root.join("crates").join(file).exists(), "there is no {file}");
    }
}

#[runs(promised)]
#[test]
fn every_path_that_the_architecture_names_is_there() {
    let root = repository();
    let text = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    let names = text.split('`').skip(1).step_by(2);
    let paths =
        names.filter(|name| ["crates/", "workshop/"].iter().any(|dir| name.starts_with(dir)));
    for path in paths {
        assert!(root.join(path).exists(), "there is no {path}");
    }
}

/// The table says of each resource which test measures its bound.
#[runs(promised)]
#[test]
fn every_test_that_the_threat_model_names_is_there() {
    let root = repository();
    let text = fs::read_to_string(root.join("docs/THREAT_MODEL.md")).unwrap();
    let mut tests = 0;
    for name in text.split('`').skip(1).step_by(2) {
        let (file, function) = name.split_once("::").unwrap_or((name, ""));
        if !["crates/", "workshop/"].iter().any(|dir| file.starts_with(dir)) {
            continue;
        }
        let file = root.join(file);
        assert!(file.exists(), "there is no {name}");
        if !function.is_empty() {
            let code = fs::read_to_string(&file).unwrap();
            assert!(code.contains(&format!("fn {function}(")), "there is no {name}");
            tests += 1;
        }
    }
    assert!(tests >= 80, "{tests} tests");
}
