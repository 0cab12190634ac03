//! How the suite runs a test, declared at the test:
//!
//! ```text
//! #[runs(alone, promised)]
//! #[test]
//! fn there_and_back() {}
//! ```
//!
//! A test program lists nothing but the names of its tests, so the marks become a part of the
//! name: the test above is `there_and_back::alone_promised`.

use proc_macro::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};

/// The marks. The suite knows the same ones.
///
/// - `alone`: nothing runs next to it, except what fills.
/// - `fills`: runs next to those, in the CPU time that they leave.
/// - `promised`: shows something that the README promises; `make test` runs it.
/// - `requested`: runs only if it is named.
const MARKS: [&str; 4] = ["alone", "fills", "promised", "requested"];

/// Marks a test. The attribute stands above `#[test]`.
#[proc_macro_attribute]
pub fn runs(marks: TokenStream, test: TokenStream) -> TokenStream {
    marked(&marks.to_string(), test).unwrap_or_else(|why| {
        format!("compile_error!({why:?});").parse().expect("a string literal is a token")
    })
}

fn marked(marks: &str, test: TokenStream) -> Result<TokenStream, String> {
    let marks: Vec<&str> = marks.split(',').map(str::trim).collect();
    if let Some(unknown) = marks.iter().find(|mark| !MARKS.contains(mark)) {
        return Err(format!("`{unknown}` is not one of {MARKS:?}"));
    }
    let mut tokens: Vec<TokenTree> = test.into_iter().collect();
    let is_fn =
        |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word.to_string() == "fn");
    let at = tokens.iter().position(is_fn).ok_or("only a function can be marked")? + 1;
    let Some(TokenTree::Ident(name)) = tokens.get(at).cloned() else {
        return Err("a function without a name can't be marked".to_owned());
    };
    tokens[at] = Ident::new(&marks.join("_"), name.span()).into();
    let imports: TokenStream = "use super::*;".parse().map_err(|_| "no import")?;
    let inside = imports.into_iter().chain(tokens).collect();
    Ok(TokenStream::from_iter([
        TokenTree::from(Ident::new("mod", Span::call_site())),
        name.into(),
        Group::new(Delimiter::Brace, inside).into(),
    ]))
}
