//! Files that use each other in a circle are at most three: a larger one is a type in the wrong
//! file. What a file uses is read from its `use` declarations and from paths in its code, up to its
//! tests; a name that a file only passes on is used where it is defined.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use lab::setup::repository;
use marks::runs;

const CIRCLE_MAX: usize = 3;

/// The names that lead to a module, from the root of its crate.
type Module = Vec<String>;

/// What a module's file names.
#[derive(Default)]
struct Code {
    /// Paths that it uses.
    used: Vec<String>,
    /// Paths from which it takes names, whether it uses them or passes them on.
    imported: Vec<String>,
}

impl Code {
    fn parse(text: &str) -> Self {
        let product = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        // `pub(in crate::…)` uses nothing.
        let product = product.replace("(in crate::", "(in ");
        let mut code = Self::default();
        let mut declaration = String::new();
        for line in product.lines() {
            let line = line.split("//").next().unwrap_or_default().trim();
            if declaration.is_empty() && !is_use(line) {
                let words = line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
                code.used.extend(words.filter(|word| word.contains("::")).map(str::to_owned));
                continue;
            }
            declaration.push_str(line);
            declaration.push(' ');
            if !line.ends_with(';') {
                continue;
            }
            let whole = declaration.trim_end().trim_end_matches(';');
            let (visibility, tree) = whole.split_once("use ").expect("a `use` declaration");
            let paths = expand(tree);
            if visibility.is_empty() {
                code.used.extend(paths.clone());
            }
            code.imported.extend(paths);
            declaration.clear();
        }
        code
    }
}

fn is_use(line: &str) -> bool {
    let before = line.split_once("use ").map(|(before, _)| before);
    before.is_some_and(|before| before.is_empty() || before.starts_with("pub"))
}

/// The paths in the tree of a `use` declaration.
fn expand(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((prefix, rest)) = tree.split_once('{') else {
        // Without `as`.
        return tree.split(' ').take(1).map(str::to_owned).collect();
    };
    let inner = rest.strip_suffix('}').unwrap_or(rest);
    let mut depth = 0;
    let parts = inner.split(|c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    let paths = parts.filter(|part| !part.trim().is_empty()).flat_map(expand);
    paths.map(|path| format!("{prefix}{path}")).collect()
}

/// The modules of a crate that are files.
#[derive(Default)]
struct Modules(BTreeMap<Module, Code>);

impl Modules {
    fn read(src: &Path) -> Self {
        let root = if src.join("lib.rs").exists() { "lib" } else { "main" };
        let mut modules = Self::default();
        let mut folders = vec![(src.to_owned(), Module::new())];
        while let Some((folder, module)) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_stem().unwrap().to_str().unwrap();
                if name == "tests" {
                    continue;
                }
                let is_root = module.is_empty() && name == root;
                let inner = if is_root { Module::new() } else { child(&module, name) };
                if path.is_dir() {
                    folders.push((path, inner));
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let code = Code::parse(&fs::read_to_string(&path).unwrap());
                    modules.0.insert(inner, code);
                }
            }
        }
        modules
    }

    /// The module that a path in `from` leads to, and the name in it; none if it is of no file of
    /// this crate.
    fn resolve<'p>(&self, from: &Module, path: &'p str) -> Option<(Module, &'p str)> {
        let mut names = path.split("::").peekable();
        let mut module = match *names.peek()? {
            "crate" => Module::new(),
            "self" | "super" => from.clone(),
            name if self.0.contains_key(&child(from, name)) => from.clone(),
            _ => return None,
        };
        while let Some(&name) = names.peek() {
            match name {
                "crate" | "self" => {}
                "super" => drop(module.pop()?),
                _ => {
                    let inner = child(&module, name);
                    if !self.0.contains_key(&inner) {
                        break;
                    }
                    module = inner;
                }
            }
            names.next();
        }
        Some((module, names.next().unwrap_or_default()))
    }

    /// The module that defines a name which this one may only pass on.
    fn definition(&self, mut module: Module, name: &str) -> Module {
        for _ in 0..self.0.len() {
            let Some(code) = self.0.get(&module) else { break };
            let is_it = |path: &&String| path.rsplit("::").next() == Some(name);
            let import = code.imported.iter().find(is_it);
            match import.and_then(|path| self.resolve(&module, path)) {
                Some((next, _)) if next != module => module = next,
                _ => break,
            }
        }
        module
    }

    /// For each module, the other ones that it uses.
    fn uses(&self) -> Uses {
        self.0.iter().map(|(module, code)| (module.clone(), self.used(module, code))).collect()
    }

    fn used(&self, module: &Module, code: &Code) -> BTreeSet<Module> {
        let paths = code.used.iter().filter_map(|path| self.resolve(module, path));
        let modules = paths.map(|(found, name)| self.definition(found, name));
        modules.filter(|used| used != module && self.0.contains_key(used)).collect()
    }
}

fn child(module: &Module, name: &str) -> Module {
    let mut path = module.clone();
    path.push(name.to_owned());
    path
}

type Uses = BTreeMap<Module, BTreeSet<Module>>;

/// All modules that this one uses, itself or through others.
fn reached<'u>(uses: &'u Uses, module: &Module) -> BTreeSet<&'u Module> {
    let mut found = BTreeSet::new();
    let mut next = vec![module];
    while let Some(module) = next.pop() {
        for used in &uses[module] {
            if found.insert(used) {
                next.push(used);
            }
        }
    }
    found
}

/// The modules of the largest circle; empty if there is none.
fn largest_circle(uses: &Uses) -> Vec<String> {
    let all: BTreeMap<&Module, BTreeSet<&Module>> =
        uses.keys().map(|module| (module, reached(uses, module))).collect();
    let circles = all.iter().map(|(module, used)| {
        let circle = used.iter().filter(|other| all[*other].contains(module));
        circle.map(|module| module.join("::")).collect::<Vec<_>>()
    });
    circles.max_by_key(Vec::len).unwrap_or_default()
}

#[runs(promised)]
#[test]
fn no_circle_of_files_is_large() {
    for folder in ["crates", "workshop"] {
        for entry in fs::read_dir(repository().join(folder)).unwrap() {
            let src = entry.unwrap().path().join("src");
            if !src.exists() {
                continue;
            }
            let circle = largest_circle(&Modules::read(&src).uses());
            assert!(circle.len() <= CIRCLE_MAX, "{}: {circle:?}", src.display());
        }
    }
}

#[runs(promised)]
#[test]
fn a_circle_is_found_through_names_that_are_passed_on() {
    let files = [
        ("", "mod a;\nmod b;\nmod c;\nmod d;\n\npub use c::{\n    C as Other,\n    In,\n};\n"),
        ("a", "use std::fs::{self, File};\n\nuse crate::b::{self, B};\n"),
        ("b", "// crate::d\nfn b(of: &super::In) {}\n"),
        ("c", "use super::a;\n\n#[cfg(test)]\nmod tests {\n    use crate::d::D;\n}\n"),
        ("d", "pub(in crate::a) use crate::{In, a::A};\nfn d() -> crate::In {}\n"),
    ];
    let modules = files.map(|(name, text)| {
        let module = if name.is_empty() { Module::new() } else { vec![name.to_owned()] };
        (module, Code::parse(text))
    });
    let circle = largest_circle(&Modules(BTreeMap::from(modules)).uses());
    assert_eq!(circle, ["a", "b", "c"]);
}
